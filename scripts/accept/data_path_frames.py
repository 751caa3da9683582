"""How many frames a round takes: a matter of bytes and chunks, not of tensors."""
import os
import re

from cluster import BIN
from runner import program

NEEDS_SHARED = False


def part_frames(report, folder, quick):
    done = program(os.path.join(BIN, "frames_test"))
    report.check("frames_test", "passes", "exit %d" % done.returncode, done.returncode == 0)
    one, large, small = map(float, re.search(r"in 1 layer ([\d.]+), in 17 layers ([\d.]+), in 963 layers ([\d.]+)", done.stdout).groups())
    what = "2 workers, 2 servers, 1 MiB: frames a round of all, "
    report.at_most(what + "963 tensors of 1 KiB (%.1f) / 16 tensors of 64 KiB (%.1f)" % (small, large), 1.25, small / large)
    report.shown(what + "one tensor, whose gradient is ready all at once", "%.1f" % one)
