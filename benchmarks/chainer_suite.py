"""Check that Chainer's own CPU tests pass inside a torturing Runtime as they do without one.

The claim: no test of Chainer 7.8.1 that passes alone fails inside a `dynamemo.Runtime` that evicts
everything evictable after every function (``--torture``). Run the suite twice and compare::

    python -m benchmarks.chainer_suite --tests DIR --jobs 8 --out plain.json
    python -m benchmarks.chainer_suite --tests DIR --jobs 8 --torture --out torture.json
    python -m benchmarks.chainer_suite --compare plain.json torture.json

``DIR`` is the ``tests`` folder of a checkout of Chainer's tag v7.8.1, which also has to be the
Chainer installed. Beside dynamemo the interpreter needs ``pytest``, ``mock`` and ``scipy``.

On a machine with a GPU, ``--gpu`` runs the tests that need one, and only they. Another claim is
checked so: no test of convolution, pooling, normalisation, activation or loss that passes without
cuDNN fails with it::

    DYNAMEMO_CUDNN=0 python -m benchmarks.chainer_suite --gpu --tests DIR --jobs 8 --out plain.json
    python -m benchmarks.chainer_suite --gpu --tests DIR --jobs 8 --out cudnn.json
    python -m benchmarks.chainer_suite --compare plain.json cudnn.json

The results name every test with its outcome (passed, failed, error, skipped, xfailed, crashed or
hung), and the machine, versions and commit. Tests that need another device, ChainerX, iDeep or
Theano, and those marked slow, are left out. The comparison also counts a test that is missing from
the second run as failed. What fails in both runs, such as Chainer's own trouble with a newer NumPy,
does not count.

Every file runs in a process of its own on one thread. A test that crashes or hangs costs only
itself: it is reported so, and the rest of its file runs in a new process. The whole suite takes
minutes; ``--sample 1/K`` keeps one parameterisation in K of every test function, and at least one.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.chainer_suite_plugin import EVICTION_COUNTERS, EXCLUDED_MARKS, Torture
from benchmarks.environment import describe

#: What the claim is about, below ``chainer_tests`` in the folder of tests.
FOLDERS = (
    "functions_tests", "links_tests", "optimizers_tests",
    "test_variable.py", "test_function.py", "test_function_node.py", "test_backprop.py",
)  # fmt: skip

#: What the claim about cuDNN is about.
GPU_FOLDERS = (
    *(f"functions_tests/{name}_tests" for name in (
        "connection", "pooling", "normalization", "activation", "loss",
    )),
    "links_tests/connection_tests", "links_tests/normalization_tests",
)  # fmt: skip

PLUGIN = "benchmarks.chainer_suite_plugin"

#: Seconds that one test may take before its process is ended.
HUNG_AFTER_S = 300.0

#: What a process may exit with after it ran its tests: all passed, some failed, none to run.
#: 2 is a file that could not be imported, which is then an outcome of its own.
ORDERLY_EXITS = (0, 1, 2, 5)

#: A file may end this many processes before the rest of it is given up.
MAX_CRASHES = 50

PYTEST_SETTINGS = (
    "[pytest]\npython_classes = Test\nfilterwarnings = ignore\naddopts = -p no:cacheprovider\n"
    "markers =\n" + "".join(f"    {mark}: see Chainer\n" for mark in EXCLUDED_MARKS)
)


@dataclass(frozen=True, slots=True)
class Part:
    """A file of tests, for one process at a time."""

    tests: Path
    path: Path
    sample: int
    torture: Torture
    is_gpu: bool
    #: Folder of its own for its log and its output, and its processes' working directory.
    scratch: Path

    @property
    def name(self) -> str:
        """Name the file as node ids do."""
        return str(self.path.relative_to(self.tests))


def main() -> int:
    """Run the suite or compare two runs; return the exit status."""
    arguments = parse_arguments()
    if arguments.compare:
        before, after = (json.loads(path.read_text("utf-8")) for path in arguments.compare)
        return compare(before, after)
    results = run_suite(arguments)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_summary(results)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tests", type=Path, help="Chainer's tests folder")
    parser.add_argument("--folders", nargs="+", help="below chainer_tests")
    parser.add_argument("--gpu", action="store_true", help="the tests for a GPU, and only they")
    parser.add_argument(
        "--sample", type=one_in, default=1, metavar="1/K", help="of every test function's cases"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit-s", type=float, help="start no file after so many seconds")
    parser.add_argument(
        "--torture",
        nargs="?",
        const=Torture.EACH_TEST,
        default=Torture.OFF,
        type=Torture,
        metavar="1|session",
        help="enter a torturing Runtime around each test (1, the default) or once a process",
    )
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="two results")
    arguments = parser.parse_args()
    if arguments.folders is None:
        arguments.folders = GPU_FOLDERS if arguments.gpu else FOLDERS
    if arguments.gpu and arguments.torture is not Torture.OFF:
        parser.error("--torture evicts on the CPU: run it without --gpu")
    if not arguments.compare and not (arguments.tests and arguments.out):
        parser.error("give --tests and --out to run the suite, or --compare A B")
    return arguments


def one_in(text: str) -> int:
    """Parse ``1/K`` (or ``K``) to K, at least 1."""
    match = re.fullmatch(r"(?:1/)?([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 1/K, such as 1/10")
    return int(match[1])


def run_suite(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every part and return what goes into the file of results."""
    start_s = time.monotonic()
    records: list[dict[str, Any]] = []
    seconds_of_files: dict[str, float] = {}
    left_out: list[str] = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.jobs) as executor:
        parts = list(parts_of(arguments, Path(scratch)))
        last_start_s = start_s + (arguments.limit_s or float("inf"))
        running = {executor.submit(run_part, part, last_start_s): part for part in parts}
        for number, done in enumerate(as_completed(running), start=1):
            finished = done.result()
            if finished is None:
                left_out.append(running[done].name)
                continue
            part_records, elapsed_s = finished
            records += part_records
            seconds_of_files[running[done].name] = round(elapsed_s, 1)
            told = progress(running[done], part_records, elapsed_s)
            print(f"{number}/{len(parts)} {told}", flush=True)
    return {
        "environment": {**describe(), "pytest": version("pytest"), "scipy": version("scipy")},
        "torture": arguments.torture.value,
        "gpu": arguments.gpu,
        "sample": f"1/{arguments.sample}",
        "folders": list(arguments.folders),
        "jobs": arguments.jobs,
        "elapsed_s": round(time.monotonic() - start_s, 1),
        "evictions": total_evictions(records),
        "outcomes": Counter(r["outcome"] for r in records if "id" in r),
        "elapsed_s_by_file": seconds_of_files,
        "files_left_out": sorted(left_out),
        "tests": {r["id"]: without_id(r) for r in sorted_by_id(records)},
    }


def parts_of(arguments: argparse.Namespace, scratch: Path) -> Iterator[Part]:
    """Yield the parts to run, large files first so that none is left over at the end."""
    root = arguments.tests.resolve()
    files = [path for name in arguments.folders for path in files_of(root / "chainer_tests" / name)]
    files.sort(key=lambda path: -path.stat().st_size)
    for number, path in enumerate(files):
        folder = scratch / str(number)
        folder.mkdir()
        yield Part(root, path, arguments.sample, arguments.torture, arguments.gpu, folder)


def files_of(place: Path) -> list[Path]:
    """Return the files of tests in a folder, or the one file."""
    if not place.exists():
        raise SystemExit(f"{place} does not exist; --tests takes the tests folder of a checkout")
    return [place] if place.is_file() else sorted(place.rglob("test_*.py"))


def run_part(part: Part, last_start_s: float) -> tuple[list[dict[str, Any]], float] | None:
    """Run a part to its end, in as many processes as its crashes make needed.

    Returns
    -------
    records, elapsed_s
        The finished tests' records, those of crashed and hung tests among them; None where it is
        later than `last_start_s` already.
    """
    start_s = time.monotonic()
    if start_s > last_start_s:
        return None
    log = part.scratch / "log.jsonl"
    log.touch()
    for _ in range(MAX_CRASHES):
        ending = run_process(part, log)
        if ending is None:
            break
        if not blame_running_test(log, *ending):
            break
    return [r for r in read_log(log) if "started" not in r], time.monotonic() - start_s


def run_process(part: Part, log: Path) -> tuple[str, str] | None:
    """Run pytest once; return None after an orderly end, else the outcome and message to log."""
    output = part.scratch / "output.txt"
    with output.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            pytest_command(part, log),
            env=environment_variables(part),
            cwd=part.scratch,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        if not ends_in_time(process, log):
            return "hung", f"took more than {HUNG_AFTER_S:.0f} s"
    if process.returncode in ORDERLY_EXITS:
        return None
    text = " ".join(output.read_text("utf-8", errors="replace").split())
    _, found, fatal = text.partition("Fatal Python error: ")
    return "crashed", f"exit status {process.returncode}: {fatal[:300] if found else text[-300:]}"


def pytest_command(part: Part, log: Path) -> list[str]:
    """Return the command line for one process."""
    settings = part.scratch / "pytest.ini"
    settings.write_text(PYTEST_SETTINGS, encoding="utf-8")
    return [
        *(sys.executable, "-m", "pytest", "-q", "--tb=short", "--no-header"),
        *("-c", str(settings), "--rootdir", str(part.tests), "-p", PLUGIN),
        *("--suite-log", str(log), "--suite-sample", str(part.sample)),
        *(["--suite-gpu"] if part.is_gpu else []),
        str(part.path),
    ]


def environment_variables(part: Part) -> dict[str, str]:
    """Return the variables of a process: one thread, fixed hashes, this checkout first.

    Without ``--gpu`` no GPU is seen.
    """
    devices = {"CHAINER_TEST_GPU_LIMIT": "1"}
    if not part.is_gpu:
        devices = {"CUDA_VISIBLE_DEVICES": "", "CHAINER_TEST_GPU_LIMIT": "0"}
    search_path = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        **devices,
        # Chainer's Caffe reader was generated for an older protobuf.
        "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python",
        "DYNAMEMO_TORTURE": part.torture.value,
    }


def ends_in_time(process: subprocess.Popen[bytes], log: Path) -> bool:
    """Wait for the end; False, with the process ended, if its log did not grow for too long."""
    seen_bytes, seen_s = 0, time.monotonic()
    while True:
        try:
            process.wait(timeout=5)
            return True
        except subprocess.TimeoutExpired:
            now_bytes = log.stat().st_size
            if now_bytes != seen_bytes:
                seen_bytes, seen_s = now_bytes, time.monotonic()
            elif time.monotonic() - seen_s > HUNG_AFTER_S:
                process.kill()
                process.wait()
                return False


def blame_running_test(log: Path, outcome: str, message: str) -> bool:
    """Log the test that was running as crashed or hung; False if none was, so a retry is no use."""
    records = read_log(log)
    finished = {record["id"] for record in records if "id" in record}
    running = [r["started"] for r in records if "started" in r and r["started"] not in finished]
    blamed = running[-1] if running else f"{log.parent.name} outside any test"
    with log.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"id": blamed, "outcome": outcome, "message": message}) + "\n")
    return bool(running)


def read_log(log: Path) -> list[dict[str, Any]]:
    """Return the records of a log; a last line that a crash cut short is dropped from the file."""
    text = log.read_text(encoding="utf-8")
    whole, _, cut = text.rpartition("\n")
    if cut:
        log.write_text(whole + "\n" if whole else "", encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print the tests that passed before and do not after; return 1 if there are any."""
    print_summary(before, name="A")
    print_summary(after, name="B")
    if before["sample"] != after["sample"]:
        print(f"warning: A sampled {before['sample']}, B {after['sample']}")
    lost: dict[str, list[str]] = defaultdict(list)
    left_out = {*before.get("files_left_out", ()), *after.get("files_left_out", ())}
    if left_out:
        print(f"warning: not compared, for lack of time: {', '.join(sorted(left_out))}")
    for name, record in before["tests"].items():
        if name.partition("::")[0] in left_out:
            continue
        now = after["tests"].get(name, {"outcome": "missing"})
        if record["outcome"] == "passed" and now["outcome"] != "passed":
            lost[f"{now['outcome']}: {now.get('message', '')}"].append(name)
    for reason, names in sorted(lost.items(), key=lambda pair: len(pair[1]), reverse=True):
        print(f"\n{len(names)} x {reason}")
        print(*(f"    {name}" for name in names), sep="\n")
    passed = sum(record["outcome"] == "passed" for record in before["tests"].values())
    regressions = sum(map(len, lost.values()))
    print(f"\n{regressions} of {passed} tests that pass in A do not pass in B")
    return 1 if regressions or not passed else 0


def print_summary(results: dict[str, Any], *, name: str = "results") -> None:
    """Print the counts of a run on a few lines."""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in results["outcomes"].items())
    print(f"{name}: torture {results['torture']}, sample {results['sample']}: {counts}")
    print(f"    {results['elapsed_s']:.0f} s in {results['jobs']} jobs")
    if results["torture"] != Torture.OFF.value:
        print("   ", ", ".join(f"{key} {n:,}" for key, n in results["evictions"].items()))


def progress(part: Part, records: list[dict[str, Any]], elapsed_s: float) -> str:
    """Describe a finished part on one line."""
    counts = Counter(record["outcome"] for record in records if "id" in record)
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "no tests"
    return f"{part.name}: {told} in {elapsed_s:.0f} s"


def total_evictions(records: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Add up the counters of all Runtimes, and count those of which any counter is not zero."""
    counters = [r.get("evictions") or r.get("session") or {} for r in records]
    totals = {name: sum(c.get(name, 0) for c in counters) for name in EVICTION_COUNTERS}
    return totals | {"runtimes_with_evictions": sum(any(c.values()) for c in counters)}


def sorted_by_id(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of tests, in the order of their ids."""
    return sorted((record for record in records if "id" in record), key=lambda r: str(r["id"]))


def without_id(record: dict[str, Any]) -> dict[str, Any]:
    """Return a test's record as it is kept under its id."""
    return {key: value for key, value in record.items() if key != "id"}


if __name__ == "__main__":
    sys.exit(main())
