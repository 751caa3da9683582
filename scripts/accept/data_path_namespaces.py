"""Slow links: what a round takes where the network is the bottleneck, against what the links let through. Processes of the benches
in network namespaces; nothing in shared memory; root only."""
import data_path_overlap
import data_path_push_pull
from namespaces import Network, NoNamespaces

NEEDS_SHARED = False

MIB = 13
PARAMETERS = 3257856  # of bench_round's GPT
# Bytes of a parameter on the wire.
PUSH = {"f32": 4, "bf16": 2, "int8": 1 + 4 / 256, "top_k": 0.06}
PULL = {"f32": 4, "bf16": 2}


def part_namespaces(report, folder, quick):
    try:
        striping(report, quick, worker_rate=1000)
        if not quick:
            striping(report, quick, worker_rate=100)
        formats(report, quick)
    except NoNamespaces as why:
        report.skipped("slow links", str(why))


def places(net, workers, servers):
    return ["--worker_places=" + ",".join(net.place("worker-%d" % i) for i in range(workers)),
            "--server_places=" + ",".join(net.place("server-%d" % i) for i in range(servers))]


def machines(workers, worker_rate, servers, server_rate):
    rates = {"worker-%d" % i: worker_rate for i in range(workers)}
    rates.update({"server-%d" % i: server_rate for i in range(servers)})
    return rates


def striping(report, quick, worker_rate):
    """Two workers push to four servers of 100 Mbit/s each, the last chunk first."""
    workers, servers, rate = 2, 4, 100
    with Network(machines(workers, worker_rate, servers, rate)) as net:
        row = data_path_push_pull.bench(
            "--only=transfers", "--mib=%d" % MIB, "--chunk_kib=416", "--shapes=%dx%d" % (workers, servers), "--backward", "--seconds=0",
            "--pairs=%d" % (1 if quick else 5), *places(net, workers, servers))["transfers"][0]
    link = min(servers * rate, workers * worker_rate) * 1e6 / 8
    least = workers * MIB * 2**20 / link
    what = "%d workers of %d Mbit/s, %d servers of %d Mbit/s: " % (workers, worker_rate, servers, rate)
    tcp, server = row["paths"]["tcp_into_place"], row["paths"]["server"]
    report.shown(what + "raw TCP, push and pull of 13 MiB / the links' time", "%.2f, %.2f (%.0f ms)" % (
        tcp["push_s"] / least, tcp["pull_s"] / least, 1e3 * least))
    report.fast(what + "push of 13 MiB, chunk by chunk, to its acknowledgement / the links' time (%.0f ms)" % (1e3 * server["taken_s"]),
                1.25, server["taken_s"] / least, most=True, noisy=tcp["push_s"] > 1.25 * least)


def formats(report, quick):
    """The small GPT on two workers of 200 Mbit/s each."""
    workers, servers, rate = 2, 2, 200
    with Network(machines(workers, rate, servers, None)) as net:
        at = places(net, workers, servers)
        tcp = data_path_push_pull.bench("--only=transfers", "--mib=%d" % MIB, "--shapes=%dx%d" % (workers, servers), "--seconds=0",
                                        "--pairs=%d" % (1 if quick else 5), *at)["transfers"][0]["paths"]["tcp_into_place"]
        # What TCP carries of payload is the rate that counts: the link's also carries headers.
        tcp_up, tcp_down = (tcp[way]["gb_per_s"] * 8e3 / workers for way in ("push", "pull"))
        report.shown("2 workers of %d Mbit/s: raw TCP of the same run, Mbit/s a worker, push, pull" % rate, "%.0f, %.0f" % (tcp_up, tcp_down))
        for push, pull in (("f32", "f32"), ("int8", "bf16"), *(() if quick else (("bf16", "bf16"), ("top_k", "bf16")))):
            rows = data_path_overlap.bench("--gpt", "--shapes=%dx%d" % (workers, servers), "--push=" + push, "--pull=" + pull,
                                           "--repeats=1", "--rounds=%d" % (3 if quick else 12), *at,
                                           *(["--discipline=stream"] if quick else []))["rows"][0]
            up, down = PARAMETERS * PUSH[push] * 8e-6 / tcp_up, PARAMETERS * PULL[pull] * 8e-6 / tcp_down
            compute = rows["alone_s"]
            for discipline, r in rows["tcp"].items():
                what = "small GPT, 2 workers of 200 Mbit/s, push %s, pull %s, %s: round" % (push, pull, discipline)
                measured = "%.0f ms (compute alone %.0f, up %.0f, down %.0f)" % tuple(1e3 * s for s in (r["round_s"], compute, up, down))
                if discipline == "STREAM":
                    report.fast("%s %s / the longest of the three" % (what, measured), 1.25, r["round_s"] / max(compute, up, down),
                                most=True, noisy=min(tcp_up, tcp_down) < 0.9 * rate)
                else:  # nothing comes down before all is up
                    report.shown(what, "%s; / (up + down, or compute) %.2f" % (measured, r["round_s"] / max(compute, up + down)))
