"""What all subjects of scripts/accept.sh share: folders, programs, the run over a subject's parts."""
import argparse
import glob
import importlib
import os
import shutil
import subprocess
import tempfile
import time

from cluster import Failed
from report import Report

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
SHARED = os.environ.get("SLUICE_SHARED", os.path.join(ROOT, "..", "shared"))
DATA = os.path.join(SHARED, "data")
PYTHON = "/usr/bin/python3"
OPENMP_BLAS = "/usr/lib/x86_64-linux-gnu/openblas-openmp"


def program(*args, timeout=3600, env=None):
    return subprocess.run(args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=timeout, env=env,
                          stdin=subprocess.DEVNULL)


def rows_of(output):
    """Programs print 'ROW what | target | measured | ok' for numbers that they measure themselves."""
    for line in output.splitlines():
        if line.startswith("ROW "):
            what, target, measured, verdict = [x.strip() for x in line[4:].split("|")]
            yield what, target, measured, verdict


def parts_in_files(subject):
    """For run_parts, of a subject whose parts are modules <subject>_<part>.py with a function part_<part>; NEEDS_SHARED = False
    says that it runs without the shared data."""
    parts = []
    for path in sorted(glob.glob(os.path.join(os.path.dirname(os.path.abspath(__file__)), subject + "_*.py"))):
        module_name = os.path.basename(path)[:-len(".py")]
        module, name = importlib.import_module(module_name), module_name[len(subject) + 1:]
        parts.append((name, getattr(module, "NEEDS_SHARED", True), getattr(module, "part_" + name)))
    return parts


def run_parts(parts):
    """parts: (name, needs the shared data, function(report, folder, quick)). Returns the exit code: 1 if a row is SHORT."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="PART[,PART]: " + ", ".join(name for name, _, _ in parts))
    parser.add_argument("--json", default="")
    parser.add_argument("--keep", action="store_true", help="leave the temporary folder")
    args = parser.parse_args()
    only = [name for name in args.only.split(",") if name]
    unknown = set(only) - {name for name, _, _ in parts}
    if unknown:
        parser.error("--only: no part %s; there are %s" % (", ".join(sorted(unknown)), ", ".join(n for n, _, _ in parts)))
    report, folder = Report(args.quick), tempfile.mkdtemp(prefix="sluice-accept-")
    for name, needs_shared, part in parts:
        if only and name not in only:
            continue
        if needs_shared and not os.path.isdir(DATA):
            report.skipped(name, "the shared data folder is absent")
            continue
        began = time.time()
        try:
            part(report, folder, args.quick)
        except (Failed, KeyError, IndexError, ValueError, OSError, subprocess.TimeoutExpired) as e:
            report.check(name, "runs", "%s: %s" % (type(e).__name__, e), False)
        print("         (%s: %.0f s)" % (name, time.time() - began), flush=True)
    if args.keep:
        print("files are in " + folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return report.finish(args.json)
