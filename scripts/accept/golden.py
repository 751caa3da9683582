"""Training against the float64 reference of the shared data: its input files, its specs, the losses of a job."""
import json
import os
import shutil
import time

import tensors
from runner import DATA, rows_of


class Golden:
    def __init__(self, folder):
        self.folder = folder
        self.reference = json.load(open(os.path.join(DATA, "golden", "gpt2_training.json")))
        os.makedirs(folder)
        self.rows = os.path.join(folder, "rows.jsonl")
        with open(self.rows, "w") as f:
            for rows in self.reference["rounds"]:
                for row in rows + [[]] * (4 - len(rows)):
                    f.write(json.dumps(row) + "\n")
        self.init = os.path.join(folder, "init")
        os.makedirs(self.init)
        shutil.copy(os.path.join(DATA, "synth", "synth_gpt2_config.json"), os.path.join(self.init, "config.json"))
        shutil.copy(os.path.join(DATA, "synth", "synth_gpt2_model.safetensors"), os.path.join(self.init, "model.safetensors"))

    def spec(self, case, workers, chunk=0, rounds=12):
        c = self.reference["cases"][case]
        o = c["optimizer"]
        if o["kind"] == "adamw":
            rule = {"adamw": {"learning_rate": o["lr"], "beta1": o["beta1"], "beta2": o["beta2"], "epsilon": o["eps"],
                              "weight_decay": o["weight_decay"]}}
        else:
            rule = {"sgd": {"learning_rate": o["lr"], "momentum": o.get("momentum", 0)}}
        if c["clip_norm"]:
            rule["clip_norm"] = c["clip_norm"]
        return {"name": "golden", "model": {"gpt2": {"layers": 2, "heads": 4, "width": 32, "context": 64, "vocabulary": 96}},
                "data": {"rows": {"path": self.rows}, "shuffle": False, "validation_fraction": 0},
                "train": {"rounds": rounds, "batch": 4}, "optimizer": rule, "init": {"path": self.init},
                "parallel": {"data": workers, "chunk_elements": chunk},
                "checkpoint": {"every_rounds": 1, "keep": 20}}

    def export(self, cluster, job):
        out = os.path.join(self.folder, "export-%d" % time.time_ns())
        cluster.sluice("export", job, out)
        return os.path.join(out, "model.safetensors")


def golden_rows(report, program_name, done):
    """What a test program measured itself, and that it passed."""
    rows = list(rows_of(done.stdout))
    for what, target, measured, verdict in rows:
        report.add("in-process " + what, target, measured, verdict)
    report.check("in-process: " + program_name, "passes", "exit %d" % done.returncode, done.returncode == 0 and rows != [])


def check_job(report, name, cluster, golden, case, job, first=0):
    """A job's losses from round `first` on and its final parameters against the reference. Returns its exported weights."""
    error = max(abs(a - b) for a, b in zip(losses(cluster, job), golden.reference["cases"][case]["losses"][first:], strict=True))
    report.at_most(name + ": loss error", 5e-6, error)
    weights = golden.export(cluster, job)
    expected = tensors.read(os.path.join(DATA, "golden", "gpt2_%s_after_12.safetensors" % case))
    report.at_most(name + ": parameters, relative norm", 2e-5,
                   tensors.relative_norm(tensors.read(weights), expected, case.startswith("adam")))
    return weights


def losses(cluster, job):
    records = [r for r in cluster.history(job)["records"] if not r.get("evaluation")]
    return [r["loss"] for r in sorted(records, key=lambda r: int(r.get("round", 0)))]
