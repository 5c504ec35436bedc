"""Random programs on the pretended device, each compared bit by bit with the same program without offloading.

python tests/pretended/programs.py --seeds 200 --devices 2
python tests/pretended/programs.py --first 17 --seeds 1          # one program again
"""

import argparse
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200, help="programs to run (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="begin no further program after so many seconds")
    parser.add_argument("--devices", type=int, default=1, help="pretended devices (default: %(default)s)")
    parser.add_argument("--kind", action="append", help="only programs of this kind; may be given several times")
    parser.add_argument(
        "--without", metavar="EDGE", help="leave out an edge of the scheduler: the programs must notice"
    )
    parser.add_argument("--until-fault", action="store_true", help="stop at the first fault")
    return parser.parse_args()


def _run_watched(seed: int, run: Any, **options: Any) -> Any:
    """Run a program; end the process, with every thread's stack, if it does not end."""

    def hang() -> None:
        print(f"seed {seed} hangs", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(2)

    watch = threading.Timer(120, hang)
    watch.daemon = True
    watch.start()
    try:
        return run(seed, **options)
    finally:
        watch.cancel()


def main() -> int:
    """Run the command line and return its status: 0 if no program showed a fault."""
    args = _arguments()
    os.environ["PRETENDED_DEVICES"] = str(args.devices)
    # These import torch, which must come after the device.
    import cuda
    import mutants
    import program
    from rich.console import Console
    from rich.progress import track

    if args.without:
        mutants.leave_out(args.without)
    console = Console()
    programs: Counter[str] = Counter()
    spills: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    faults: list[str] = []
    start = time.monotonic()
    seeds = range(args.first, args.first + args.seeds)
    for seed in track(seeds, "programs", console=console, transient=True):
        if args.seconds is not None and time.monotonic() - start > args.seconds:
            break
        began = time.monotonic()
        try:
            outcome = _run_watched(seed, program.run, kinds=args.kind)
        except Exception:
            outcome = program.Outcome("raised", "a program without offloading", [traceback.format_exc()])
        programs[outcome.kind] += 1
        seconds[outcome.kind] += time.monotonic() - began
        spills[outcome.kind] += outcome.spills
        for fault in outcome.faults:
            faults.append(f"seed {seed}, {outcome.name}: {fault}")
            console.print(faults[-1], markup=False, highlight=False)
        if faults and args.until_fault:
            break
    for kind in sorted(programs):
        console.print(
            f"{kind}: {programs[kind]} programs, {spills[kind]:,} spills, {seconds[kind]:.1f} s", highlight=False
        )
    counts = cuda.counts()
    console.print(
        f"{sum(programs.values())} programs on {args.devices} device(s), {counts['operators']:,} operators, "
        f"{counts['copies']:,} copies, {sum(spills.values()):,} spills in {time.monotonic() - start:.0f} s: "
        f"{len(faults)} faults",
        style="red" if faults else "green",
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
