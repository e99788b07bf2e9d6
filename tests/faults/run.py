"""Injects faults into small runs at random but seeded moments, and checks that each still ends with the right result.

    python tests/faults/run.py --faults 200 --seed 0

survived: the next run of the same command ended with bit-identical results. refused: it printed one line with the
problem and a remedy, which led there. lost: anything else, above all a wrong result or a hang; then the exit code is 1.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

NAMESPACE = "FCL_FAULTS_NAMESPACE"  # set in a process that may mount
# How often a kind comes up: those that start servers or workers take many seconds.
OFTEN = {"SIGKILL of a worker": 0.4, "SIGKILL of the MLflow server": 0.15, "SIGKILL of the Prefect server": 0.15}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="how many to inject")
    parser.add_argument("--seed", type=int, default=0, help="of the kinds, places and moments")
    parser.add_argument("--kinds", default="", help="only kinds with this text in their names")
    parser.add_argument("--only", type=int, nargs="+", help="only the faults of these numbers")
    parser.add_argument("--json", type=Path, help="write the outcome of each fault there")
    options = parser.parse_args()
    if NAMESPACE not in os.environ:
        return run_in_own_namespace()
    root = Path(tempfile.mkdtemp(prefix="fclflow-faults-"))
    outcomes = inject(root, options)
    if options.json:
        options.json.write_text(json.dumps(outcomes, indent=1))
    print_table(outcomes)
    lost = [outcome for outcome in outcomes if outcome["became"] == "lost"]
    if not lost:
        shutil.rmtree(root)
    return 1 if lost else 0


def run_in_own_namespace() -> int:
    """Run this script again where its mounts are invisible to others and end with it, if that is allowed."""
    ways = [["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]]
    allowed = [way for way in ways if shutil.which("unshare") and not subprocess.call([*way, "true"], stderr=-3)]
    command = [*(allowed[0] if allowed else []), sys.executable, *sys.argv]
    return subprocess.call(command, env={**os.environ, NAMESPACE: "own" if allowed else "none"})


def inject(root: Path, options: argparse.Namespace) -> list[dict[str, str]]:
    from injuries import KINDS
    from workshop import Workshop

    kinds = [kind for kind in KINDS if options.kinds in kind]
    workshop, outcomes = Workshop(root), []
    try:
        workshop.open()
        for number, kind in enumerate(draw_kinds(kinds, options.faults, options.seed)):
            is_selected = options.only is None or number in options.only
            while is_selected and kinds:
                chance = random.Random(f"{options.seed} {number}")
                outcomes.append(inject_one(workshop, kind, chance) | {"number": str(number)})
                print("{number:>4} {became:9} {kind}: {what} ({seconds} s)".format(**outcomes[-1]), flush=True)  # noqa: T201
                if is_selected := outcomes[-1]["became"] == "skipped":  # another one in its place
                    kinds = [other for other in kinds if other != kind]
                    kind = draw_weighted(kinds, 1, chance)[0] if kinds else ""
    finally:
        workshop.close()
    return outcomes


def draw_kinds(kinds: list[str], count: int, seed: int) -> list[str]:
    """Return each kind once and others at random, in a random order."""
    chance = random.Random(f"kinds {seed}")
    drawn_kinds = [*kinds, *draw_weighted(kinds, max(0, count - len(kinds)), chance)][:count]
    return chance.sample(drawn_kinds, len(drawn_kinds))


def draw_weighted(kinds: list[str], count: int, chance: random.Random) -> list[str]:
    return chance.choices(kinds, [OFTEN.get(kind, 1.0) for kind in kinds], k=count)


def inject_one(workshop: "Workshop", kind: str, chance: random.Random) -> dict[str, str]:  # noqa: F821
    from injuries import KINDS, Impossible, Scene, mend
    from workshop import BrokenPromise

    scene, started = Scene(workshop, chance), time.monotonic()
    refusals: list[str] = []
    what = ""
    with scene.mended:
        try:
            what = KINDS[kind](scene)
            mend(scene, refusals)
            became, what = ("refused", f"{what}: {refusals[0]}") if refusals else ("survived", what)
        except Impossible as problem:
            became, what = "skipped", str(problem)
        except BrokenPromise as problem:
            became, what = "lost", f"{scene.project.folder}: {what}: {problem}"
    if became != "lost":
        shutil.rmtree(scene.project.folder)
    return {"kind": kind, "became": became, "what": what, "seconds": f"{time.monotonic() - started:.1f}"}


def print_table(outcomes: list[dict[str, str]]) -> None:
    columns = ("survived", "refused", "lost", "skipped")
    counts = Counter((outcome["kind"], outcome["became"]) for outcome in outcomes)
    lines = [("fault", "injected", *columns)]
    for kind in (*dict.fromkeys(sorted(outcome["kind"] for outcome in outcomes)), "all"):
        of_kind = [sum(n for (k, b), n in counts.items() if b == became and kind in (k, "all")) for became in columns]
        lines.append((kind, str(sum(of_kind[:3])), *map(str, of_kind)))
    for name, *cells in lines:
        print(f"| {name} | {' | '.join(cells)} |")  # noqa: T201
        if name == "fault":
            print("|---" + "|--:" * len(cells) + "|")  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
