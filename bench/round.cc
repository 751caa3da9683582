// How long a round takes and where its time goes, through the real server and the real worker as processes over gRPC on
// loopback.
//
//   bench_round [--mparameters=1,4,16,64,100] [--shapes=2x2,1x1] [--rounds=20] [--json]
//   bench_round --gpt [--repeats=3] [--rounds=15] [--shapes=2x2,1x1] [--push=f32] [--pull=f32] [--json]
//               [--discipline=verdict|stream] [--worker_places=NAME@HOST,...] [--server_places=NAME@HOST,...]
//
// Without --gpt: a synthetic model of so many million parameters that computes nothing, on WORKERSxSERVERS, with one
// verdict a round and streamed; plain SGD. The round is all communication: push of every gradient, sums, verdict,
// applying, and commits of every parameter. GB/s: payload that one worker moves in both directions, by the round time.
//
// With --gpt: what of a real job's round is communication that computing does not hide. GPT-2 with 4 layers, 256 wide,
// 8 heads, context 128 (3.3 million parameters), AdamW, workers of one thread each with 8 x 128 tokens a round; 2
// workers and 2 servers, then 1 and 1, over TCP and with payloads in shared memory. `exposed` = 1 - (round time with
// pushes and pulls cut out) / (round time), medians: cut out means the same train loop, model, data and number of
// worker processes without servers, each round given out at once, gradients going nowhere (RoundsAlone in
// round_nodes.cc). Runs with and without are taken in turns. On a machine with fewer cores than processes the servers'
// own work takes cores from the workers: it is in `exposed`. `CPU share` is what of all CPU seconds the cut-out run
// does not need: with busy cores, no overlap can bring `exposed` below it. `workers' clocks` are what the job's history
// tells (docs/performance.md).
//
// Exit code 1: something failed.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "bench/measure.h"
#include "bench/round_nodes.h"
#include "common/status_macros.h"
#include "nlohmann/json.hpp"

ABSL_FLAG(std::vector<std::string>, mparameters, std::vector<std::string>({"1", "4", "16", "64", "100"}),
          "sizes, in 2^20 parameters, 1 to 512");
ABSL_FLAG(std::vector<std::string>, shapes, std::vector<std::string>({"2x2", "1x1"}), "WORKERSxSERVERS, 1 to 16 each");
ABSL_FLAG(int, rounds, 20, "timed rounds of a run, after 3 that warm up");
ABSL_FLAG(bool, gpt, false, "the small GPT: exposed communication");
ABSL_FLAG(int, repeats, 3, "--gpt: runs with communication and runs without, in turns");
ABSL_FLAG(std::string, discipline, "", "--gpt: verdict or stream; empty: both");
ABSL_FLAG(std::string, push, "f32", "--gpt: f32, bf16, f16, int8, top_k (1%)");
ABSL_FLAG(std::string, pull, "f32", "--gpt: f32, bf16");
ABSL_FLAG(std::vector<std::string>, worker_places, {},
          "--gpt: NAME@HOST of each worker: a network namespace and the address");
ABSL_FLAG(std::vector<std::string>, server_places, {}, "--gpt: the same of each server");
ABSL_FLAG(bool, json, false, "print JSON instead of tables");

namespace sluice {
namespace {

using nlohmann::json;

std::string Ms(double seconds) { return absl::StrFormat("%.1f", 1e3 * seconds); }
std::string Share(double part, double whole) { return absl::StrFormat("%.0f%%", whole > 0 ? 100 * part / whole : 0); }

json Shares(const RoundResult& r) {
  return {{"compute_s", r.compute}, {"exposed_s", r.exposed}, {"others_s", r.others}, {"verdict_s", r.verdict}};
}

// ---------------------------------------------------------------- synthetic
absl::Status ReadShape(const std::string& shape, RoundJob* job) {
  const std::vector<std::string> sides = absl::StrSplit(shape, 'x');
  if (sides.size() != 2 || !absl::SimpleAtoi(sides[0], &job->workers) || !absl::SimpleAtoi(sides[1], &job->servers) ||
      job->workers < 1 || job->workers > 16 || job->servers < 1 || job->servers > 16) {
    return absl::InvalidArgumentError(absl::StrCat("--shapes=", shape, ": expected WORKERSxSERVERS of 1 to 16 each"));
  }
  return absl::OkStatus();
}

absl::Status Synthetic() {
  std::vector<RoundJob> jobs;
  for (const std::string& size : absl::GetFlag(FLAGS_mparameters)) {
    for (const std::string& shape : absl::GetFlag(FLAGS_shapes)) {
      RoundJob job;
      RETURN_IF_ERROR(ReadShape(shape, &job));
      uint32_t millions = 0;
      if (!absl::SimpleAtoi(size, &millions) || millions < 1 || millions > 512) {
        return absl::InvalidArgumentError(absl::StrCat("--mparameters=", size, ": expected 1 to 512"));
      }
      job.mib = 4 * millions;
      job.rounds = static_cast<uint64_t>(absl::GetFlag(FLAGS_rounds));
      for (const bool verdict : {true, false}) {
        job.verdict = verdict;
        jobs.push_back(job);
      }
    }
  }
  json rows = json::array();
  const bool text = !absl::GetFlag(FLAGS_json);
  if (text) {
    std::printf("%s, %s; %d rounds each\n\n", DateAndMachine().c_str(), PriorityName().c_str(),
                absl::GetFlag(FLAGS_rounds));
    std::printf(
        "| 2^20 parameters | workers x servers | discipline | round, ms (quartiles) | GB/s a worker | exposed | others "
        "| verdict | CPU ms, workers + servers |\n|---|---|---|---|---|---|---|---|---|\n");
  }
  for (const RoundJob& job : jobs) {
    ASSIGN_OR_RETURN(const RoundResult r, RunRounds(job, /*alone=*/false));
    const Quartiles q = QuartilesOf(r.seconds);
    const double gigabytes = 2.0 * job.mib * (1 << 20) / 1e9, all = r.compute + r.exposed + r.others + r.verdict;
    json row = {{"parameters", uint64_t{job.mib} << 18},
                {"workers", job.workers},
                {"servers", job.servers},
                {"discipline", job.verdict ? "VERDICT" : "STREAM"},
                {"round_s", q.median},
                {"round_s_q1", q.low},
                {"round_s_q3", q.high},
                {"gb_per_s", gigabytes / q.median},
                {"worker_cpu_s", r.worker_cpu},
                {"server_cpu_s", r.server_cpu}};
    row.update(Shares(r));
    rows.push_back(row);
    if (!text) continue;
    std::printf("| %u | %ux%u | %s | %s (%s-%s) | %.2f | %s | %s | %s | %s + %s |\n", job.mib / 4, job.workers,
                job.servers, job.verdict ? "VERDICT" : "STREAM", Ms(q.median).c_str(), Ms(q.low).c_str(),
                Ms(q.high).c_str(), gigabytes / q.median, Share(r.exposed, all).c_str(), Share(r.others, all).c_str(),
                Share(r.verdict, all).c_str(), Ms(r.worker_cpu).c_str(), Ms(r.server_cpu).c_str());
    std::fflush(stdout);
  }
  if (!text) {
    const json all = {{"benchmark", "round"},
                      {"machine", DateAndMachine()},
                      {"priority", PriorityName()},
                      {"rounds", absl::GetFlag(FLAGS_rounds)},
                      {"rows", rows}};
    std::printf("%s\n", all.dump(2).c_str());
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------- GPT
// Runs of one kind, laid together.
void Add(RoundResult* all, const RoundResult& run, double part) {
  all->seconds.insert(all->seconds.end(), run.seconds.begin(), run.seconds.end());
  for (double RoundResult::*field : {&RoundResult::compute, &RoundResult::exposed, &RoundResult::others,
                                     &RoundResult::verdict, &RoundResult::worker_cpu, &RoundResult::server_cpu}) {
    all->*field += run.*field * part;
  }
}

// By verdict, streamed.
std::vector<bool> Disciplines() {
  const std::string only = absl::GetFlag(FLAGS_discipline);
  if (only.empty()) return {true, false};
  return {only == "verdict"};
}

// One way of carrying payloads, both disciplines: a job's runs, and its part of the row.
struct GptRuns {
  const char* key;
  const char* name;
  bool shared_memory;
  RoundResult verdict = {}, stream = {};

  absl::Status Run(RoundJob job, double part) {
    job.shared_memory = shared_memory;
    for (const bool by_verdict : Disciplines()) {
      job.verdict = by_verdict;
      ASSIGN_OR_RETURN(const RoundResult r, RunRounds(job, /*alone=*/false));
      Add(by_verdict ? &verdict : &stream, r, part);
    }
    return absl::OkStatus();
  }

  json Row(const RoundResult& r, const RoundResult& alone, const std::string& label, bool text) const {
    const Quartiles q = QuartilesOf(r.seconds);
    const double all = r.compute + r.exposed + r.others + r.verdict;
    const double exposed = 1 - QuartilesOf(alone.seconds).median / q.median;
    // What the wall would be if every core were busy all the time with what the processes do.
    const double cpu = 1 - alone.worker_cpu / (r.worker_cpu + r.server_cpu);
    json row = {{"round_s", q.median},
                {"round_s_q1", q.low},
                {"round_s_q3", q.high},
                {"exposed", exposed},
                {"cpu_share", cpu},
                {"worker_cpu_s", r.worker_cpu},
                {"server_cpu_s", r.server_cpu},
                {"clocks_exposed", all > 0 ? (r.exposed + r.verdict) / all : 0},
                {"clocks_add_up_to", all / q.median}};
    row.update(Shares(r));
    if (text) {
      std::printf("| %s, %s | %s (%s-%s) | %.1f%% | %.1f%% | %s, %s, %s | %s + %s |\n", label.c_str(), name,
                  Ms(q.median).c_str(), Ms(q.low).c_str(), Ms(q.high).c_str(), 100 * exposed, 100 * cpu,
                  Share(r.exposed, all).c_str(), Share(r.others, all).c_str(), Share(r.verdict, all).c_str(),
                  Ms(r.worker_cpu).c_str(), Ms(r.server_cpu).c_str());
    }
    return row;
  }
};

absl::StatusOr<json> GptOn(const std::string& shape, bool text) {
  RoundJob job;
  RETURN_IF_ERROR(ReadShape(shape, &job));
  job.gpt = true;
  job.rounds = static_cast<uint64_t>(absl::GetFlag(FLAGS_rounds));
  job.push = absl::GetFlag(FLAGS_push);
  job.pull = absl::GetFlag(FLAGS_pull);
  ASSIGN_OR_RETURN(job.worker_places, ParsePlaces(absl::GetFlag(FLAGS_worker_places), job.workers));
  ASSIGN_OR_RETURN(job.server_places, ParsePlaces(absl::GetFlag(FLAGS_server_places), job.servers));
  RETURN_IF_ERROR(MakeRoundLayout(job, std::vector<std::string>(job.servers, "127.0.0.1:1")).status());
  const uint32_t workers = job.workers, servers = job.servers;
  const bool apart = !absl::GetFlag(FLAGS_server_places).empty();  // then nothing is in shared memory
  const int repeats = absl::GetFlag(FLAGS_repeats);
  RoundResult alone;
  std::vector<GptRuns> ways = {{"tcp", "TCP", false}};
  if (!apart) ways.push_back({"shared_memory", "shared memory", true});
  for (int i = 0; i < repeats; ++i) {
    ASSIGN_OR_RETURN(const RoundResult a, RunRounds(job, /*alone=*/true));
    Add(&alone, a, 1.0 / repeats);
    for (GptRuns& way : ways) RETURN_IF_ERROR(way.Run(job, 1.0 / repeats));
  }
  const Quartiles without = QuartilesOf(alone.seconds);
  json out = {{"workers", workers},        {"servers", servers},         {"alone_s", without.median},
              {"alone_s_q1", without.low}, {"alone_s_q3", without.high}, {"alone_cpu_s", alone.worker_cpu}};
  if (text) {
    std::printf("| %ux%u, pushes and pulls cut out | %s (%s-%s) | | | | %s |\n", workers, servers,
                Ms(without.median).c_str(), Ms(without.low).c_str(), Ms(without.high).c_str(),
                Ms(alone.worker_cpu).c_str());
  }
  for (const GptRuns& way : ways) {
    for (const bool by_verdict : Disciplines()) {
      const char* discipline = by_verdict ? "VERDICT" : "STREAM";
      out[way.key][discipline] = way.Row(by_verdict ? way.verdict : way.stream, alone,
                                         absl::StrFormat("%ux%u %s", workers, servers, discipline), text);
    }
  }
  std::fflush(stdout);
  return out;
}

absl::Status Gpt() {
  const bool text = !absl::GetFlag(FLAGS_json);
  if (text) {
    std::printf("%s, %s; %d runs of %d rounds each\n\n", DateAndMachine().c_str(), PriorityName().c_str(),
                absl::GetFlag(FLAGS_repeats), absl::GetFlag(FLAGS_rounds));
    std::printf(
        "| small GPT, workers x servers, payloads | round, ms (quartiles) | exposed | CPU share | workers' clocks: "
        "exposed, "
        "others, verdict | CPU ms, workers + servers |\n|---|---|---|---|---|---|\n");
  }
  json rows = json::array();
  for (const std::string& shape : absl::GetFlag(FLAGS_shapes)) {
    ASSIGN_OR_RETURN(const json row, GptOn(shape, text));
    rows.push_back(row);
  }
  if (!text) {
    const json all = {{"benchmark", "round_gpt"},
                      {"machine", DateAndMachine()},
                      {"priority", PriorityName()},
                      {"rounds", absl::GetFlag(FLAGS_rounds) * absl::GetFlag(FLAGS_repeats)},
                      {"rows", rows}};
    std::printf("%s\n", all.dump(2).c_str());
  }
  return absl::OkStatus();
}

int Main() {
  if (const std::string only = absl::GetFlag(FLAGS_discipline); only != "" && only != "verdict" && only != "stream") {
    std::fprintf(stderr, "bench_round: --discipline=%s: expected verdict or stream\n", only.c_str());
    return 2;
  }
  if (absl::GetFlag(FLAGS_rounds) < 1 || absl::GetFlag(FLAGS_repeats) < 1) {
    std::fprintf(stderr, "bench_round: --rounds and --repeats must be at least 1\n");
    return 2;
  }
  return RunBench("bench_round", absl::GetFlag(FLAGS_gpt) ? Gpt : Synthetic);
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return sluice::Main();
}
