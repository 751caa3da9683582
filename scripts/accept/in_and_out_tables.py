"""Tables and images: odd IDX and CSV files, accuracies on held-out samples, exports that give the same accuracy elsewhere.

Splits, fixed: MNIST, of the 10,000 images in the t10k files the first 8,000 train and the last 2,000 test; digits and iris,
rows 4, 9, 14, ... (counted from 0, without the header) test and all others train. Seeds 1, 2, 3; the mean accuracy counts.
"""
import gzip
import json
import os
import re
import struct
import subprocess

import numpy as np

import tensors
from cluster import BIN, Failed
from runner import DATA

SLUICE = os.path.join(BIN, "sluice")

# file: (accepted, what the message says beside the file's name). What the manifest leaves open is an error here.
IDX = {
    "ok20-images-idx3-ubyte": (True, ""), "ok20-labels-idx1-ubyte": (True, ""),
    "truncated_raw-images": (False, "15680 bytes of elements, 15580 are present"),
    "truncated_gz-images.gz": (False, "the gzip stream ends early"), "empty-images": (False, "the file is empty"),
    "short_header-images": (False, "the file ends within the IDX header, after 7 bytes"),
    "label_magic_for_images": (False, "magic 0x00000803 expected for IDX images, found 0x00000801"),
    "little_endian-images": (False, "found 0x03080000; the header is little-endian"),
    "trailing_bytes-images": (False, "5 trailing bytes"), "dims_overflow-images": (False, "too large to be true"),
    "float32_type-images": (False, "element type 0x0d"), "git_lfs_pointer-images.gz": (False, "this is a Git LFS pointer"),
}
CSV = {  # with the label's column
    "bom_header.csv": ("label", True, ""), "bom_quoted_header.csv": ("label", True, ""), "quoted_newline.csv": ("y", True, ""),
    "ragged.csv": ("c", False, ":3: 2 of 3 columns"), "colon_in_csv.csv": ("y", False, 'column 2 ("t"): a number is expected'),
    "semicolon.csv": ("y", False, "separated by ';'"), "utf16.csv": ("y", False, "looks like UTF-16"),
}


def spec_file(folder, spec):
    path = os.path.join(folder, spec["name"] + ".json")
    with open(path, "w") as f:
        json.dump(spec, f)
    return path


def job(name, model, data, rounds, batch, optimizer):
    return {"name": name, "model": model, "data": data, "train": {"rounds": rounds, "batch": batch}, "optimizer": optimizer,
            "parallel": {"data": 2}}


def nasty(report, folder):
    rate = {"adamw": {"learning_rate": 1e-3}}
    cases = []
    for name, (good, text) in IDX.items():
        idx = {"images": "ok20-images-idx3-ubyte", "labels": "ok20-labels-idx1-ubyte"}
        idx["labels" if "labels" in name else "images"] = name
        data = {"idx": {k: os.path.join(DATA, "nasty", "idx", v) for k, v in idx.items()}}
        cases.append(("idx/" + name, data, good, text))
    for name, (label, good, text) in CSV.items():
        csv = {"path": os.path.join(DATA, "nasty", "csv", name), "label": label}
        if name == "quoted_newline.csv":
            csv["ignore"] = ["description"]
        cases.append(("csv/" + name, {"csv": csv}, good, text))
    verdicts = {e["file"]: e["expect"] for e in json.load(open(os.path.join(DATA, "nasty", "MANIFEST.json")))}
    listed = {f for f in verdicts if f.startswith(("idx/", "csv/"))}
    report.check("odd files of the manifest that have a case", "all", "%d of %d" % (len(listed & {c[0] for c in cases}), len(listed)),
                 listed == {c[0] for c in cases})
    for file, data, good, text in cases:
        done = subprocess.run([SLUICE, "validate", spec_file(folder, job("nasty", {"softmax": {}}, data, 1, 1, rate))],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        said = (done.stdout + done.stderr).strip().replace(os.path.join(DATA, "nasty", ""), "")
        right = done.returncode in ((0,) if good else (1, 2)) and text in said and (good or os.path.basename(file) in said)
        report.check(file, verdicts.get(file, ""), "exit %d: %s" % (done.returncode, said[-200:]), right)


def read_idx(path):
    raw = gzip.open(path).read()
    dims = struct.unpack(">i", b"\0\0\0" + raw[3:4])[0]
    shape = struct.unpack(">%dI" % dims, raw[4:4 + 4 * dims])
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape)


def write_idx(path, values):
    with gzip.open(path, "wb", 1) as f:
        f.write(struct.pack(">I", 0x800 + values.ndim) + struct.pack(">%dI" % values.ndim, *values.shape) + values.tobytes())


def mnist(folder):
    source = os.path.join(DATA, "cls", "mnist-t10k-%s-ubyte.gz")
    x, y = read_idx(source % "images-idx3"), read_idx(source % "labels-idx1")
    paths = {k: os.path.join(folder, "mnist-" + k + ".gz") for k in ("images", "labels", "validation_images", "validation_labels")}
    write_idx(paths["images"], x[:8000])
    write_idx(paths["labels"], y[:8000])
    write_idx(paths["validation_images"], x[8000:])
    write_idx(paths["validation_labels"], y[8000:])
    return {"idx": paths}, [r.reshape(-1) for r in x[8000:]], [str(v) for v in y[8000:]]


def table(folder, name, label, header):
    path = os.path.join(DATA, "cls", name)
    lines = (gzip.open(path, "rt") if name.endswith(".gz") else open(path)).read().splitlines()
    head, rows = (lines[:1], lines[1:]) if header else ([], lines)
    paths = []
    for part, kept in (("train", [r for i, r in enumerate(rows) if i % 5 != 4]), ("test", rows[4::5])):
        paths.append(os.path.join(folder, name.split(".")[0] + "-" + part + ".csv"))
        with open(paths[-1], "w") as f:
            f.write("\n".join(head + kept) + "\n")
    fields = [r.split(",") for r in rows[4::5]]
    return ({"csv": {"path": paths[0], "validation_path": paths[1], "label": label}},
            [np.array(f[:-1], float) for f in fields], [f[-1] for f in fields])


def accuracy_of_export(folder, rows, labels):
    """What another program makes of the exported folder."""
    config = json.load(open(os.path.join(folder, "config.json")))
    weights = tensors.read(os.path.join(folder, "model.safetensors"))
    x = np.array(rows, float) * config.get("scale", 1)
    if "standardization" in config:
        x = (x - np.array(config["standardization"]["mean"])) / np.array(config["standardization"]["deviation"])
    layers = sorted({k.rpartition(".")[0] for k in weights}, key=lambda k: int(k or 0))
    for i, layer in enumerate(layers):
        dot = layer + "." if layer else ""
        x = x @ weights[dot + "weight"].T.astype(float) + weights[dot + "bias"]
        if i + 1 < len(layers):
            x = np.maximum(x, 0)
    found = x.argmax(1) if config["outputs"] > 1 else (x[:, 0] > 0).astype(int)
    return float(np.mean([config["labels"][f] == l for f, l in zip(found, labels)]))


def train(folder, spec, seed):
    """Accuracy that the job reports, and its run folder."""
    done = subprocess.run([SLUICE, "local", spec_file(folder, spec), "--runs", os.path.join(folder, "runs"), "--servers=2",
                           "--set", "train.seed=%d" % seed, "--name", "%s-%d" % (spec["name"], seed)],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=600)
    # The line of the end; the progress lines before it tell of earlier versions, without the comma.
    found = re.search(r"^validation loss \S+, accuracy ([0-9.]+)$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        raise Failed("%s: exit %d\n%s%s" % (spec["name"], done.returncode, done.stdout[-2000:], done.stderr))
    return float(found.group(1)), os.path.join(folder, "runs", "%s-%d-1" % (spec["name"], seed))


def part_tables(report, folder, quick):
    nasty(report, folder)
    sets = [("mnist", 0.945, mnist(folder), {"mlp": {"hidden": [256]}}, 2500, 64,
             {"adamw": {"learning_rate": 1e-3, "weight_decay": 0.05}, "schedule": {"cosine": {"warmup_rounds": 100, "final": 1e-5}}}),
            ("digits", 0.96, table(folder, "digits.csv.gz", "-1", False), {"mlp": {"hidden": [64]}}, 1000, 32,
             {"adamw": {"learning_rate": 2e-3}, "schedule": {"cosine": {"warmup_rounds": 50, "final": 1e-5}}}),
            ("iris", 0.90, table(folder, "iris.csv", "-1", True), {"softmax": {}}, 500, 16, {"adamw": {"learning_rate": 1e-2}})]
    for name, least, (data, rows, labels), model, rounds, batch, optimizer in sets:
        accuracies = []
        for seed in (1, 2, 3):
            spec = job(name, model, data, rounds, batch, optimizer)
            accuracy, run = train(folder, spec, seed)
            accuracies.append(accuracy)
            if seed == 1:
                elsewhere = accuracy_of_export(os.path.join(run, "export"), rows, labels)
                # A sample may lie on the edge between two classes, where rounding decides.
                report.check("%s: accuracy of the export in float64" % name, "%.4f, one sample at most" % accuracy, "%.4f" % elsewhere,
                             abs(elsewhere - accuracy) <= 1.01 / len(labels) + 5e-5)
        report.at_least("%s: mean accuracy of 3 seeds (%d test samples)" % (name, len(labels)), least, float(np.mean(accuracies)))
        report.shown("%s: by seed" % name, " ".join("%.4f" % a for a in accuracies))
