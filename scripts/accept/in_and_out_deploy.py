"""Containers and the Debian package: the rows of deploy/test_compose.sh and deploy/test_deb.sh, and the image's size. Not in
--quick: CI runs the scripts by themselves."""
import os
import re

from runner import ROOT, program

NEEDS_SHARED = False
IMAGE_MEGABYTES = 60  # more than its base


def rows_of(report, script):
    run = program(os.path.join(ROOT, "deploy", script), timeout=1200)
    lines = run.stdout.splitlines()
    if run.returncode == 77:
        report.skipped(script, next((line for line in lines if line.startswith("SKIPPED")), "no reason given"))
        return
    for line in lines:
        if not line.startswith("ok "):
            continue
        what = line[2:].strip()
        size = re.search(r"the image is .*base: ([0-9.]+) MB", what)
        if size:
            report.at_most("the image, MB more than its base", IMAGE_MEGABYTES, float(size.group(1)))
        else:
            report.check(script + ": " + what, "holds", "holds", True)
    report.check(script, "exit 0", "exit %d" % run.returncode, run.returncode == 0)
    if run.returncode != 0:
        print(run.stdout)


def part_deploy(report, folder, quick):
    if quick:
        return
    rows_of(report, "test_compose.sh")
    rows_of(report, "test_deb.sh")
