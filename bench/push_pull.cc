// How fast a parameter space moves between workers and parameter servers in processes of their own, beside what sockets
// can do in the same run.
//
//   bench_push_pull [--mib=64] [--shapes=1x1] [--chunk_kib=1024] [--push=f32] [--pull=f32] [--window_mib=4]
//                   [--pairs=11] [--seconds=0.5] [--only=transfers|trips] [--json]
//                   [--backward] [--worker_places=NAME@HOST,...] [--server_places=NAME@HOST,...]
//
// --shapes (WORKERSxSERVERS), --chunk_kib, --push and --pull are lists; all combinations are measured. Workers are
// pinned to the first half of the cores, servers to the other. Each pair takes the paths one after the other, each for
// at least --seconds, in which all bytes go there and back again and again:
//
//   TCP into place send() out of all the memory, recv() into memory that keeps it, woken for 128 KiB at a time: the
//                  least that a program pays on sockets of its own, one from each worker to each server. Always
//                  float32. The ratios hold the other paths against it, pair by pair.
//   TCP hot        the same out of and into memory that stays in the caches and is thrown away (blaster.h).
//   TCP plain      as hot, woken for every segment: what a straightforward program gets (blaster.h).
//   server         the real ServerNodes behind their gRPC listeners and the real PsClient: a round of SGD with one
//                  decision (clip norm 1). Push: from the first call until the first commit has come back, that is,
//                  encoding, receiving, counting and summing all contributions, norm, verdict, applying the first
//                  chunks and one frame's way back. Pull: from there until the last commit is in place at the workers,
//                  the servers applying one chunk while the one before is on its way. More of the border cannot be seen
//                  from a worker.
//   shared memory  the same, the workers' gradients and the servers' values lying where both map them.
//   stream alone   transport and frames without server arithmetic (stream_alone.h).
//
// Hot, plain and alone: of f32 between one worker and one server. GB/s: of float32 parameters, all workers together,
// whatever is on the wire. After each pair the workers' parameters are compared bit by bit with SGD computed here from
// the formats' definitions, and what came over the other paths with what was sent. CPU s/GB: user and system time of
// all threads of all processes over push and pull, by float32 of both directions. Where the quartiles of TCP into place
// lie more than 20% of its median apart, the series is taken again, up to 3 times; then the quietest one is shown and
// marked NOISY. On a machine where other programs run, `chrt -f 10 bench_push_pull` keeps them off these cores.
//
// With --backward chunks leave one by one, the last one first, as a backward pass makes them. With places
// (network_place.h) the processes run in network namespaces, and nothing is in shared memory.
//
// Then 1 KiB there and back, one at a time and with 64 under way (round_trip.h).
//
// Exit codes: 1: a value was wrong, or something failed; 2: usage.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "bench/measure.h"
#include "bench/round_trip.h"
#include "bench/transfer_nodes.h"
#include "common/status_macros.h"
#include "nlohmann/json.hpp"

using Strings = std::vector<std::string>;
ABSL_FLAG(int, mib, 64, "MiB of float32 moved in each transfer, 1 to 2048");
ABSL_FLAG(Strings, shapes, Strings({"1x1"}), "WORKERSxSERVERS: 1 or 2 workers, 1, 2 or 4 servers");
ABSL_FLAG(Strings, chunk_kib, Strings({"1024"}), "KiB of float32 in a chunk, 1 to 32768");
ABSL_FLAG(Strings, push, Strings({"f32"}), "f32, bf16, f16, int8, top_k (1%)");
ABSL_FLAG(Strings, pull, Strings({"f32"}), "f32, bf16");
ABSL_FLAG(int, window_mib, 4, "MiB that may be under way unacknowledged, a stream");
ABSL_FLAG(int, pairs, 11, "timed pairs of a series; one more warms up");
ABSL_FLAG(double, seconds, 0.5, "least time of a path in a pair");
ABSL_FLAG(std::string, only, "", "transfers or trips; empty: both");
ABSL_FLAG(bool, backward, false, "chunks leave one by one, the last one first");
ABSL_FLAG(Strings, worker_places, {}, "NAME@HOST of each: a network namespace and the address there");
ABSL_FLAG(Strings, server_places, {}, "the same");
ABSL_FLAG(bool, json, false, "print JSON instead of tables");

namespace sluice {
namespace {

using nlohmann::json;

constexpr int kMaxSeries = 3;
constexpr double kMaxSpread = 0.2;

std::string Text(const std::vector<double>& values, double unit = 1, const char* format = "%.2f (%.2f-%.2f)") {
  const Quartiles q = QuartilesOf(values);
  return absl::StrFormat(*absl::ParsedFormat<'f', 'f', 'f'>::New(format), q.median * unit, q.low * unit, q.high * unit);
}

// ---------------------------------------------------------------- transfers
// One path's series.
struct Path {
  TransferPath path;
  const char* key;
  const char* name;
  std::vector<double> push = {}, pull = {}, push_ratio = {}, pull_ratio = {};  // GB/s; to the ceiling in the same pair
  double worker_cpu = 0, server_cpu = 0;                                       // seconds
  double gigabytes = 0;
  std::vector<double> push_seconds = {}, pull_seconds = {}, taken_seconds = {};  // of one exchange

  static json Json(const std::vector<double>& rate, const std::vector<double>& ratio) {
    const Quartiles r = QuartilesOf(rate), q = QuartilesOf(ratio);
    return {{"gb_per_s", r.median}, {"gb_per_s_q1", r.low}, {"gb_per_s_q3", r.high},
            {"ratio", q.median},    {"ratio_q1", q.low},    {"ratio_q3", q.high}};
  }
  json Json() const {
    return {{"push", Json(push, push_ratio)},
            {"pull", Json(pull, pull_ratio)},
            {"push_s", QuartilesOf(push_seconds).median},
            {"pull_s", QuartilesOf(pull_seconds).median},
            {"taken_s", QuartilesOf(taken_seconds).median},
            {"cpu_s_per_gb_worker", worker_cpu / gigabytes},
            {"cpu_s_per_gb_server", server_cpu / gigabytes}};
  }
};

struct Series {
  std::vector<Path> paths;  // the first one is the ceiling
  double spread() const { return std::max(QuartilesOf(paths[0].push).Spread(), QuartilesOf(paths[0].pull).Spread()); }
};

Series EmptySeries(const ParameterJob& job) {
  const bool f32 = job.push == "f32" && job.pull == "f32" && job.server_places.empty(),
             one = f32 && job.workers * job.servers == 1;
  Series series;
  series.paths.push_back({TransferPath::kPlace, "tcp_into_place", "TCP into place"});
  if (one) series.paths.push_back({TransferPath::kHot, "tcp_hot", "TCP hot"});
  if (one) series.paths.push_back({TransferPath::kPlain, "tcp_plain", "TCP plain"});
  series.paths.push_back({TransferPath::kServer, "server", "server: push, sum, verdict, SGD, commits"});
  if (f32) series.paths.push_back({TransferPath::kShared, "shared_memory", "server, payloads in shared memory"});
  if (one) series.paths.push_back({TransferPath::kAlone, "stream_alone", "stream alone"});
  return series;
}

absl::Status MeasurePath(TransferNodes* nodes, const ParameterJob& job, const Path& ceiling, double least, Path* path) {
  ASSIGN_OR_RETURN(const double worker_before, nodes->WorkerCpu());
  ASSIGN_OR_RETURN(const double server_before, nodes->ServerCpu());
  TransferSeconds sum;
  int exchanges = 0;
  for (; exchanges == 0 || sum.push + sum.pull < least; ++exchanges) {
    ASSIGN_OR_RETURN(const TransferSeconds one, nodes->Exchange(path->path));
    sum.push += one.push;
    sum.pull += one.pull;
    sum.taken += one.taken;
  }
  ASSIGN_OR_RETURN(const double server_after, nodes->ServerCpu());
  ASSIGN_OR_RETURN(const double worker_after, nodes->WorkerCpu());
  path->worker_cpu += worker_after - worker_before;
  path->server_cpu += server_after - server_before;
  const double gigabytes = static_cast<double>(job.bytes()) * job.workers * exchanges / 1e9;
  path->gigabytes += 2 * gigabytes;
  path->push_seconds.push_back(sum.push / exchanges);
  path->pull_seconds.push_back(sum.pull / exchanges);
  path->taken_seconds.push_back(sum.taken / exchanges);
  path->push.push_back(gigabytes / sum.push);
  path->pull.push_back(gigabytes / sum.pull);
  path->push_ratio.push_back(path->push.back() / ceiling.push.back());
  path->pull_ratio.push_back(path->pull.back() / ceiling.pull.back());
  return nodes->Verify(path->path);
}

absl::StatusOr<Series> MeasureSeries(TransferNodes* nodes, const ParameterJob& job, uint64_t* gradient) {
  Series series = EmptySeries(job);
  for (int pair = -1; pair < absl::GetFlag(FLAGS_pairs); ++pair) {
    RETURN_IF_ERROR(nodes->SetGradient((*gradient)++));
    Series warm_up = EmptySeries(job);
    Series& into = pair < 0 ? warm_up : series;
    for (Path& path : into.paths) {
      RETURN_IF_ERROR(MeasurePath(nodes, job, into.paths[0], pair < 0 ? 0.1 : absl::GetFlag(FLAGS_seconds), &path));
    }
  }
  return series;
}

absl::StatusOr<json> Transfers(const ParameterJob& job, bool text) {
  const Series empty = EmptySeries(job);
  ASSIGN_OR_RETURN(const auto nodes, TransferNodes::Start(job, empty.paths.back().path == TransferPath::kAlone));
  uint64_t gradient = 0;
  ASSIGN_OR_RETURN(Series quietest, MeasureSeries(nodes.get(), job, &gradient));
  int taken = 1;
  for (; taken < kMaxSeries && quietest.spread() > kMaxSpread; ++taken) {
    ASSIGN_OR_RETURN(Series again, MeasureSeries(nodes.get(), job, &gradient));
    if (again.spread() < quietest.spread()) quietest = std::move(again);
  }
  const bool noisy = quietest.spread() > kMaxSpread;
  json row = {{"workers", job.workers}, {"servers", job.servers}, {"chunk_kib", job.chunk_elements / 256},
              {"push", job.push},       {"pull", job.pull},       {"pinned", nodes->pinned()},
              {"series", taken},        {"verified", true},       {"noisy", noisy}};
  const std::string what =
      absl::StrFormat("%ux%u, %u KiB, %s / %s", job.workers, job.servers, job.chunk_elements / 256, job.push, job.pull);
  for (const Path& path : quietest.paths) {
    row["paths"][path.key] = path.Json();
    if (!text) continue;
    std::printf("| %s | %s%s | %s | %s | %s | %s | %.2f + %.2f |\n", what.c_str(), path.name, noisy ? ", NOISY" : "",
                Text(path.push).c_str(), Text(path.pull).c_str(), Text(path.push_ratio).c_str(),
                Text(path.pull_ratio).c_str(), path.worker_cpu / path.gigabytes, path.server_cpu / path.gigabytes);
  }
  std::fflush(stdout);
  return row;
}

absl::StatusOr<json> AllTransfers(const std::vector<ParameterJob>& jobs, bool text) {
  if (text) {
    std::printf(
        "%d MiB of float32, window %d MiB; every element verified; medians (quartiles) of %d interleaved pairs of at "
        "least %g s a path; GB/s of float32; ratios to TCP into place in the same pair\n\n",
        absl::GetFlag(FLAGS_mib), absl::GetFlag(FLAGS_window_mib), absl::GetFlag(FLAGS_pairs),
        absl::GetFlag(FLAGS_seconds));
    std::printf(
        "| workers x servers, chunk, push / pull | path | push | pull | push / TCP | pull / TCP | CPU s/GB, workers + "
        "servers |\n|---|---|---|---|---|---|---|\n");
  }
  json rows = json::array();
  for (const ParameterJob& job : jobs) {
    ASSIGN_OR_RETURN(const json row, Transfers(job, text));
    rows.push_back(row);
  }
  return rows;
}

// ---------------------------------------------------------------- round trips
// One path's series; ratios to TCP with as many under way in the same pair.
struct Trips {
  TripPath path;
  bool many;
  const char* key;
  const char* name;
  std::vector<double> seconds = {}, ratio = {};  // of a message
};

std::vector<Trips> EmptyTrips() {
  std::vector<Trips> all;
  for (const bool many : {false, true}) {
    all.push_back({TripPath::kTcp, many, "tcp", "TCP ping-pong"});
    all.push_back({TripPath::kStream, many, "stream_alone", "stream alone, to the acknowledgement"});
    all.push_back({TripPath::kTaken, many, "server_taken", "server, streamed, to the acknowledgement"});
    all.push_back({TripPath::kServer, many, "server", "server, streamed, to the commit"});
    all.push_back({TripPath::kVerdict, many, "server_verdict", "server, one decision, to the commit"});
  }
  return all;
}

double TripSpread(const std::vector<Trips>& all) {
  double spread = 0;
  for (const Trips& trips : all) {
    if (trips.path == TripPath::kTcp) spread = std::max(spread, QuartilesOf(trips.seconds).Spread());
  }
  return spread;
}

absl::StatusOr<std::vector<Trips>> MeasureTrips(RoundTrips* ends) {
  std::vector<Trips> all = EmptyTrips();
  for (int pair = -1; pair < absl::GetFlag(FLAGS_pairs); ++pair) {
    double tcp = 0;
    for (Trips& trips : all) {
      ASSIGN_OR_RETURN(const double seconds,
                       ends->Measure(trips.path, trips.many, pair < 0 ? 0.05 : absl::GetFlag(FLAGS_seconds)));
      if (trips.path == TripPath::kTcp) tcp = seconds;
      if (pair < 0) continue;
      trips.seconds.push_back(seconds);
      trips.ratio.push_back(seconds / tcp);
    }
  }
  return all;
}

absl::StatusOr<json> RoundTripTimes(bool text) {
  ASSIGN_OR_RETURN(const auto ends, RoundTrips::Start());
  ASSIGN_OR_RETURN(std::vector<Trips> quietest, MeasureTrips(ends.get()));
  int taken = 1;
  for (; taken < kMaxSeries && TripSpread(quietest) > kMaxSpread; ++taken) {
    ASSIGN_OR_RETURN(std::vector<Trips> again, MeasureTrips(ends.get()));
    if (TripSpread(again) < TripSpread(quietest)) quietest = std::move(again);
  }
  const bool noisy = TripSpread(quietest) > kMaxSpread;
  json out = {{"bytes", kTripBytes}, {"verified", true}, {"series", taken}, {"noisy", noisy}};
  if (text) {
    std::printf("\n1 KiB there and back; medians (quartiles) of %d interleaved pairs of at least %g s a path%s\n\n",
                absl::GetFlag(FLAGS_pairs), absl::GetFlag(FLAGS_seconds), noisy ? "; NOISY" : "");
    std::printf(
        "| path | under way | us a message | messages/s | time / TCP | messages/s / TCP "
        "|\n|---|---|---|---|---|---|\n");
  }
  for (const Trips& trips : quietest) {
    const Quartiles s = QuartilesOf(trips.seconds), r = QuartilesOf(trips.ratio);
    std::vector<double> frames;
    for (const double ratio : trips.ratio) frames.push_back(1 / ratio);
    out[trips.many ? "many" : "one"][trips.key] = {
        {"seconds", s.median},    {"seconds_q1", s.low},
        {"seconds_q3", s.high},   {"time_ratio", r.median},
        {"time_ratio_q1", r.low}, {"time_ratio_q3", r.high},
        {"per_s", 1 / s.median},  {"rate_ratio", QuartilesOf(frames).median}};
    if (!text) continue;
    std::printf("| %s | %u | %s | %.0f | %s | %s |\n", trips.name, trips.many ? kManyTrips : 1,
                Text(trips.seconds, 1e6, "%.1f (%.1f-%.1f)").c_str(), 1 / s.median, Text(trips.ratio).c_str(),
                Text(frames).c_str());
  }
  return out;
}

// ---------------------------------------------------------------- what is asked for
absl::StatusOr<std::vector<ParameterJob>> Jobs() {
  std::vector<ParameterJob> jobs;
  const int mib = absl::GetFlag(FLAGS_mib), window = absl::GetFlag(FLAGS_window_mib);
  if (mib < 1 || mib > 2048 || window < 1 || window > 1024 || absl::GetFlag(FLAGS_pairs) < 1) {
    return absl::InvalidArgumentError("--mib 1 to 2048, --window_mib 1 to 1024, --pairs at least 1");
  }
  for (const std::string& shape : absl::GetFlag(FLAGS_shapes)) {
    for (const std::string& chunk : absl::GetFlag(FLAGS_chunk_kib)) {
      for (const std::string& push : absl::GetFlag(FLAGS_push)) {
        for (const std::string& pull : absl::GetFlag(FLAGS_pull)) {
          ParameterJob job;
          const Strings sides = absl::StrSplit(shape, 'x');
          uint32_t kib = 0;
          if (sides.size() != 2 || !absl::SimpleAtoi(sides[0], &job.workers) || job.workers < 1 || job.workers > 2 ||
              !absl::SimpleAtoi(sides[1], &job.servers) || (job.servers != 1 && job.servers != 2 && job.servers != 4) ||
              !absl::SimpleAtoi(chunk, &kib) || kib < 1 || kib > 32768) {
            return absl::InvalidArgumentError(
                absl::StrCat("--shapes=", shape, " --chunk_kib=", chunk,
                             ": expected 1 or 2 workers x 1, 2 or 4 servers, and 1 to 32768 KiB"));
          }
          job.elements = static_cast<uint64_t>(mib) << 18;
          job.chunk_elements = uint64_t{kib} << 8;
          job.push = push;
          job.pull = pull;
          job.window = static_cast<size_t>(window) << 20;
          job.backward = absl::GetFlag(FLAGS_backward);
          if (const Strings places = absl::GetFlag(FLAGS_worker_places); !places.empty()) {
            ASSIGN_OR_RETURN(job.worker_places, ParsePlaces(places, job.workers));
          }
          if (const Strings places = absl::GetFlag(FLAGS_server_places); !places.empty()) {
            ASSIGN_OR_RETURN(job.server_places, ParsePlaces(places, job.servers));
          }
          const Strings nowhere(job.servers, "127.0.0.1:1");
          RETURN_IF_ERROR(MakeBenchLayout(job, nowhere).status());
          jobs.push_back(job);
        }
      }
    }
  }
  return jobs;
}

absl::Status Measure() {
  const std::string only = absl::GetFlag(FLAGS_only);
  if (only != "" && only != "transfers" && only != "trips") {
    return absl::InvalidArgumentError(absl::StrCat("--only=", only, ": expected transfers or trips"));
  }
  ASSIGN_OR_RETURN(const std::vector<ParameterJob> jobs, Jobs());
  const bool text = !absl::GetFlag(FLAGS_json);
  if (text)
    std::printf("%s, %s, workers and servers on cores of their own\n\n", DateAndMachine().c_str(),
                PriorityName().c_str());
  json all = {{"benchmark", "push_pull"},
              {"machine", DateAndMachine()},
              {"priority", PriorityName()},
              {"mib", absl::GetFlag(FLAGS_mib)},
              {"window_mib", absl::GetFlag(FLAGS_window_mib)},
              {"pairs", absl::GetFlag(FLAGS_pairs)},
              {"seconds", absl::GetFlag(FLAGS_seconds)}};
  if (only != "trips") {
    ASSIGN_OR_RETURN(all["transfers"], AllTransfers(jobs, text));
  }
  if (only != "transfers") {
    ASSIGN_OR_RETURN(all["trips"], RoundTripTimes(text));
  }
  if (!text) std::printf("%s\n", all.dump(2).c_str());
  return absl::OkStatus();
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return sluice::RunBench("bench_push_pull", sluice::Measure);
}
