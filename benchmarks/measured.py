"""What the benchmarks of speed and memory share: a measured call, the machine, and parts in processes of their own."""

import argparse
import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple


class Run(NamedTuple):
    """A call: what it returned, seconds of the clock and of the processor, and MB by which its resident memory passed
    that before it."""

    value: Any
    seconds: float
    processor: float
    extra: float


def once(function: Callable[[], Any]) -> Run:
    """Call it. The peak is the kernel's (VmHWM), which misses nothing; memory freed before is given back first."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, clock, processor = memory("VmRSS"), time.perf_counter(), time.process_time()
    value = function()
    seconds = time.perf_counter() - clock, time.process_time() - processor
    return Run(value, *seconds, memory("VmHWM") - before)


def memory(key: str) -> float:
    """A memory figure of this process, MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024 / 1e6


def machine(packages: Iterable[str]) -> dict[str, Any]:
    """The processor's name, the number of cores, and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), "unknown processor")
    return {"processor": model, "cores": os.cpu_count(), **{name: version(name) for name in packages}}


def main(
    summary: str,
    parts: Mapping[str, Callable[[], dict[str, Any]]],
    measure: Callable[[], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
) -> None:
    """The command line of a benchmark: the table or, with --json, one object; --part runs one part in this process."""
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--part", choices=parts, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        with contextlib.redirect_stdout(sys.stderr):  # libraries may print
            found = parts[arguments.part]()
        print(json.dumps(found))
    else:
        result = measure()
        print(json.dumps(result) if arguments.json else table(result))
