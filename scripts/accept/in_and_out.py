"""The numbers of what goes in and what comes out. Called by scripts/accept.sh."""
import sys

from runner import parts_in_files, run_parts

sys.exit(run_parts(parts_in_files("in_and_out")))
