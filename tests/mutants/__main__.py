"""Mutation testing of the pure modules: changes one place at a time and expects a test of the room to fail.

    make mutants                                  300 mutants by a fixed seed; about an hour on one core
    make mutants ARGS="--room router --count 40"
    make mutants ARGS=--again                     those that survived the last run, after tests were added

Exits with 1 if fewer than 95 % of the mutants that are not equivalent are killed, or if a survivor has no reason in
survivors.toml. The mutations are Cosmic Ray's (operators.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from tests.mutants.places import Mutant, mutants_of, sample
from tests.mutants.rooms import ROOMS, TOO_SLOW, modules, other_tests, own_tests
from tests.mutants.runner import CPU_S, Copy, Ran, load_libraries, run

ROOT = Path(__file__).parents[2]
WORK = ROOT / ".tmp" / "mutants"
REPORT = WORK / "report.json"
ENOUGH = 0.95


def main() -> int:
    args = _arguments()
    every = [one for name, path in modules(ROOT).items() for one in mutants_of(name, path, ROOT)]
    chosen = [one for one in sample(every, args.count, args.seed, ROOT) if args.room in (None, one.room)]
    if args.again:
        survived = {one["name"] for one in json.loads(REPORT.read_text()) if one["survived"]}
        chosen = [one for one in every if one.name in survived]
    if args.match:
        chosen = [one for one in chosen if any(text in one.name for text in args.match)]
    print(f"{len(every)} mutants of {len(modules(ROOT))} modules; {len(chosen)} are run", flush=True)
    if args.list:
        print(*(one.name for one in chosen), sep="\n")
        return 0
    load_libraries()
    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK) as place:
        copy = Copy(ROOT, Path(place) / "tree")
        if not (args.again or args.unchecked):
            _check_tests(copy, chosen)
        results = _run(copy, chosen, WORK / "again.json" if args.again or args.match else REPORT)
    return _judge(results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--room", choices=ROOMS)
    parser.add_argument("--match", action="append", metavar="TEXT", help="only mutants whose names contain it")
    parser.add_argument("--again", action="store_true", help="only what survived the last run")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests without a mutant first")
    parser.add_argument("--list", action="store_true", help="print the sample and end")
    return parser.parse_args()


def _check_tests(copy: Copy, chosen: list[Mutant]) -> None:
    """Tests that fail without a mutant would kill every mutant."""
    for room in ROOMS:
        mine = [one for one in chosen if one.room == room]
        tests = [test for one in mine for test in own_tests(one.module, room, copy.at)]
        tests = list(dict.fromkeys([*tests, *(other_tests(mine[0].module, room, copy.at) if mine else ())]))
        if not tests:
            continue
        ran = run(copy, tests, TOO_SLOW, WORK / "unchanged.log", cpu_s=10 * CPU_S)
        print(f"unchanged: tests of {room} {'pass' if ran.passed else 'FAIL'} in {ran.wall_s:.0f} s", flush=True)
        if not ran.passed:
            raise SystemExit(f"{ran.how}; see {WORK / 'unchanged.log'}")


def _run(copy: Copy, chosen: list[Mutant], report: Path) -> list[tuple[Mutant, Ran]]:
    """First the module's own tests, which kill most mutants; then the others of the room for those that survive."""
    results: dict[str, tuple[Mutant, Ran]] = {}
    for title, tests_of in (("the module's tests", own_tests), ("the room's other tests", other_tests)):
        left = [one for one in chosen if one.name not in results or results[one.name][1].passed]
        started_s = time.monotonic()
        print(f"{title}: {len(left)} mutants", flush=True)
        for index, mutant in enumerate(left, 1):
            tests = tests_of(mutant.module, mutant.room, copy.at)
            if tests:
                with copy.changed(mutant.path, mutant.code((copy.at / mutant.path).read_text())):
                    ran = run(copy, tests, TOO_SLOW, copy.at.parent / "mutant.log", cpu_s=CPU_S)
            else:
                ran = Ran(passed=True, how="no tests", wall_s=0.0)
            results[mutant.name] = mutant, ran
            if ran.passed:
                print(f"\rsurvived: {mutant.path}:{mutant.position[0]}\n    {mutant.name}", flush=True)
            rows = [
                {"name": name, "survived": each.passed, "how": each.how, "wall_s": round(each.wall_s, 1)}
                for name, (_, each) in results.items()
            ]
            report.write_text(json.dumps(rows, indent=1))
            _progress(index, len(left), sum(each.passed for _, each in results.values()), started_s)
        print()
    return list(results.values())


def _progress(done: int, of: int, survived: int, started_s: float) -> None:
    left_s = (time.monotonic() - started_s) / done * (of - done)
    bar = "#" * (30 * done // of)
    end = "" if sys.stdout.isatty() else "\n"
    print(f"\r[{bar:<30}] {done}/{of}, {survived} survived, {left_s / 60:.0f} min left", end=end, flush=True)


def _judge(results: list[tuple[Mutant, Ran]]) -> int:
    listed = {
        one["mutant"]: one for one in tomllib.loads(Path(__file__).with_name("survivors.toml").read_text())["survivor"]
    }
    print(f"{'room':<16}{'mutants':>8}{'killed':>8}{'equivalent':>12}{'survived':>10}{'killed of the others':>22}")
    totals = [0, 0, 0]
    for room in (*ROOMS, "all"):
        mine = [(one, ran) for one, ran in results if room in (one.room, "all")]
        if not mine:
            continue
        killed = sum(not ran.passed for _, ran in mine)
        equivalent = sum(ran.passed and listed.get(one.name, {}).get("equivalent", False) for one, ran in mine)
        totals = [len(mine), killed, equivalent]
        share = killed / max(1, len(mine) - equivalent)
        print(f"{room:<16}{len(mine):>8}{killed:>8}{equivalent:>12}{len(mine) - killed - equivalent:>10}{share:>21.1%}")
    unlisted = [one for one, ran in results if ran.passed and one.name not in listed]
    for one in unlisted:
        print(f"no reason in survivors.toml: {one.path}:{one.position[0]}\n    {one.name}")
    num, killed, equivalent = totals
    return int(bool(unlisted) or killed < ENOUGH * (num - equivalent))


if __name__ == "__main__":
    sys.exit(main())
