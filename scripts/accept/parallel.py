"""Tensor, pipeline and model parallelism. Called by scripts/accept.sh."""
import sys

from runner import parts_in_files, run_parts

if __name__ == "__main__":
    sys.exit(run_parts(parts_in_files("parallel")))
