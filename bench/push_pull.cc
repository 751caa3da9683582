// How fast a parameter space moves between a worker and a parameter server in two processes, beside what the socket
// itself can do in the same run.
//
//   bench_push_pull [--mib=64] [--chunk_kib=1024] [--window_mib=4] [--pairs=15] [--json]
//
// Two processes, each pinned to a core of its own. Each pair moves the same number of bytes there and back on six
// paths, one after the other:
//
//   TCP into place send() out of all the memory, recv() into memory that keeps it, woken for 128 KiB at a time: the
//   least
//                  that a program pays on a socket of its own. The ratios hold the other paths against it, pair by
//                  pair.
//   TCP hot        the same out of and into memory that stays in the caches and is thrown away (blaster.h).
//   TCP plain      as hot, woken for every segment: what a straightforward program gets (blaster.h).
//   server         the real ServerNode behind its gRPC listener and the real PsClient: one round of SGD with one
//                  decision a round (clip norm 1). Push: from the first call until the first commit has come back, that
//                  is, receiving, counting and summing all contributions, norm, verdict, applying the first chunks and
//                  one frame's way back. Pull: from there until the last commit is in place at the worker, the server
//                  applying one chunk while the one before is on its way. More of the border cannot be seen from a
//                  worker.
//   shared memory  the same, the worker's gradient and the server's values lying where both map them.
//   stream alone   transport and frames without server arithmetic (stream_alone.h).
//
// After each pair the worker's parameters are compared bit by bit with SGD computed here, and what came over the other
// paths with what was sent. CPU s/GB: user and system time of all threads of both processes over push and pull, by
// payload of both directions. Where the quartiles of TCP into place lie more than 20% of its median apart, the series
// is taken again, up to 3 times; then the quietest one is shown and marked NOISY. On a machine where other programs
// run, `chrt -f 10 bench_push_pull` keeps them off these cores for the seconds that it takes.
//
// Exit code 1: a value was wrong, or something failed.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "bench/blaster.h"
#include "bench/measure.h"
#include "bench/parameter_job.h"
#include "bench/parameter_server.h"
#include "bench/parameter_worker.h"
#include "bench/stream_alone.h"
#include "common/grpc_transport.h"
#include "common/log.h"
#include "common/rpc.h"
#include "common/status_macros.h"
#include "nlohmann/json.hpp"

ABSL_FLAG(int, mib, 64, "MiB of float32 moved in each transfer");
ABSL_FLAG(int, chunk_kib, 1024, "KiB of a chunk, which is a frame of its own");
ABSL_FLAG(int, window_mib, 4, "MiB that may be under way unacknowledged");
ABSL_FLAG(int, pairs, 15, "timed pairs of a series; two more warm up");
ABSL_FLAG(bool, json, false, "print JSON instead of a table");

namespace sluice {
namespace {

constexpr int kWarmUp = 2, kMaxSeries = 3;
constexpr double kMaxSpread = 0.2;

struct Ports {
  int tcp = 0, plain = 0, server = 0, shared = 0, stream = 0;
};

// ---------------------------------------------------------------- the serving process
absl::Status Serve(const TransferShape& shape, int report, int control) {
  ASSIGN_OR_RETURN(const auto blaster, BlasterServer::Start(shape.bytes));
  ASSIGN_OR_RETURN(const auto plain, BlasterServer::Start(shape.bytes));
  StreamAloneService alone(shape);
  ASSIGN_OR_RETURN(const auto listener, GrpcServer::Start({}, {&alone}));
  ASSIGN_OR_RETURN(const auto server, BenchServer::Start(shape.bytes >> 20, shape.chunk_bytes / sizeof(float)));
  ASSIGN_OR_RETURN(const auto shared, BenchServer::Start(shape.bytes >> 20, shape.chunk_bytes / sizeof(float)));
  const Ports ports{blaster->port(), plain->port(), server->port(), shared->port(), listener->port()};
  if (write(report, &ports, sizeof(ports)) != sizeof(ports)) return absl::UnavailableError("the measuring end is gone");
  // Each byte asks for this end's CPU seconds; the pipe's end ends this process.
  for (char byte;;) {
    const ssize_t n = read(control, &byte, 1);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return absl::OkStatus();
    const double seconds = CpuSeconds();
    if (write(report, &seconds, sizeof(seconds)) != sizeof(seconds)) return absl::OkStatus();
  }
}

// ---------------------------------------------------------------- results
// One path's series.
struct Path {
  const char* key;
  const char* name;
  std::vector<double> push = {}, pull = {}, push_ratio = {}, pull_ratio = {};  // GB/s; to the ceiling in the same pair
  double worker_cpu = 0, server_cpu = 0;                                       // seconds
  double gigabytes = 0;

  void Add(const Path& ceiling, double push_rate, double pull_rate) {
    push.push_back(push_rate);
    pull.push_back(pull_rate);
    push_ratio.push_back(push_rate / ceiling.push[push.size() - 1]);
    pull_ratio.push_back(pull_rate / ceiling.pull[pull.size() - 1]);
  }
  static nlohmann::json Json(const std::vector<double>& rate, const std::vector<double>& ratio) {
    const Quartiles r = QuartilesOf(rate), q = QuartilesOf(ratio);
    return {{"gb_per_s", r.median}, {"gb_per_s_q1", r.low}, {"gb_per_s_q3", r.high},
            {"ratio", q.median},    {"ratio_q1", q.low},    {"ratio_q3", q.high}};
  }
  nlohmann::json Json() const {
    return {{"push", Json(push, push_ratio)},
            {"pull", Json(pull, pull_ratio)},
            {"cpu_s_per_gb_worker", worker_cpu / gigabytes},
            {"cpu_s_per_gb_server", server_cpu / gigabytes}};
  }
  static std::string Text(const std::vector<double>& values) {
    const Quartiles q = QuartilesOf(values);
    return absl::StrFormat("%.2f (%.2f-%.2f)", q.median, q.low, q.high);
  }
  void Print() const {
    std::printf("| %s | %s | %s | %s | %s | %.2f + %.2f |\n", name, Text(push).c_str(), Text(pull).c_str(),
                Text(push_ratio).c_str(), Text(pull_ratio).c_str(), worker_cpu / gigabytes, server_cpu / gigabytes);
  }
};

struct Series {
  Path place{"tcp_into_place", "TCP into place"}, hot{"tcp_hot", "TCP hot"}, plain{"tcp_plain", "TCP plain"};
  Path server{"server", "server: push, sum, verdict, SGD, commits"};
  Path shared{"shared_memory", "server, payloads in shared memory"}, alone{"stream_alone", "stream alone"};
  double spread() const { return std::max(QuartilesOf(place.push).Spread(), QuartilesOf(place.pull).Spread()); }
};

// ---------------------------------------------------------------- the measuring process
class Bench {
 public:
  Bench(const TransferShape& shape, int report, int control)
      : shape_(shape), report_(report), control_(control), elements_(shape.bytes / sizeof(float)) {}

  absl::Status Connect(const Ports& ports) {
    ASSIGN_OR_RETURN(blaster_, Blaster::Connect(ports.tcp, shape_.bytes));
    ASSIGN_OR_RETURN(plain_, Blaster::Connect(ports.plain, shape_.bytes));
    alone_ =
        std::make_unique<StreamAlone>(shape_, &transport_, HostPort{"127.0.0.1", ports.stream}.ToString(), pulled_);
    ASSIGN_OR_RETURN(const auto layout, LayoutAt(ports.server));
    ASSIGN_OR_RETURN(const auto shared_layout, LayoutAt(ports.shared));
    ASSIGN_OR_RETURN(auto region, SharedRegion::Make(shape_.bytes));
    expected_ = std::make_unique<ExpectedParameters>(*layout);
    worker_ = std::make_unique<BenchWorker>(layout, &transport_, shape_.window_bytes);
    shared_worker_ = std::make_unique<BenchWorker>(shared_layout, &transport_, shape_.window_bytes, std::move(region));
    RETURN_IF_ERROR(worker_->AwaitInitial());
    RETURN_IF_ERROR(shared_worker_->AwaitInitial());
    RETURN_IF_ERROR(expected_->Compare(shared_worker_->parameters()));
    return expected_->Compare(worker_->parameters());
  }

  absl::StatusOr<Series> Measure(int pairs) {
    Series series;
    for (int pair = -kWarmUp; pair < pairs; ++pair) {
      Series warm_up;
      RETURN_IF_ERROR(MeasurePair(pair < 0 ? &warm_up : &series));
    }
    return series;
  }

 private:
  using Transfer = std::function<absl::Status()>;

  absl::StatusOr<std::shared_ptr<const Layout>> LayoutAt(int port) const {
    return MakeBenchLayout(shape_.bytes >> 20, shape_.chunk_bytes / sizeof(float),
                           HostPort{"127.0.0.1", port}.ToString());
  }

  absl::StatusOr<double> ServerCpu() {
    double seconds = 0;
    if (write(control_, "c", 1) != 1 || read(report_, &seconds, sizeof(seconds)) != sizeof(seconds)) {
      return absl::UnavailableError("the serving process is gone");
    }
    return seconds;
  }

  static absl::StatusOr<double> Seconds(const Transfer& transfer) {
    const absl::Time start = absl::Now();
    RETURN_IF_ERROR(transfer());
    return absl::ToDoubleSeconds(absl::Now() - start);
  }

  // Runs both directions, which tell their seconds, and books them and the CPU time to `path`.
  absl::Status Book(Path* path, const Path& ceiling,
                    const std::function<absl::StatusOr<BenchWorker::Times>()>& transfers) {
    ASSIGN_OR_RETURN(const double server_before, ServerCpu());
    const double worker_before = CpuSeconds();
    ASSIGN_OR_RETURN(const BenchWorker::Times times, transfers());
    path->worker_cpu += CpuSeconds() - worker_before;
    ASSIGN_OR_RETURN(const double server_after, ServerCpu());
    path->server_cpu += server_after - server_before;
    const double gigabytes = static_cast<double>(shape_.bytes) / 1e9;
    path->gigabytes += 2 * gigabytes;
    path->Add(ceiling, gigabytes / times.push_seconds, gigabytes / times.pull_seconds);
    return absl::OkStatus();
  }
  absl::Status Book(Path* path, const Path& ceiling, const Transfer& push, const Transfer& pull) {
    return Book(path, ceiling, [&]() -> absl::StatusOr<BenchWorker::Times> {
      BenchWorker::Times times;
      ASSIGN_OR_RETURN(times.push_seconds, Seconds(push));
      ASSIGN_OR_RETURN(times.pull_seconds, Seconds(pull));
      return times;
    });
  }

  absl::Status MeasurePair(Series* series) {
    const uint64_t round = round_++;
    FillBenchGradient(round, gradient_.get());
    const Path& ceiling = series->place;

    ForgetPulled();
    RETURN_IF_ERROR(Book(
        &series->place, ceiling, [&] { return blaster_->PushFrom(gradient_->data()); },
        [&] { return blaster_->PullInto(pulled_->data()); }));
    RETURN_IF_ERROR(ComparePulled("TCP into place"));

    RETURN_IF_ERROR(Book(
        &series->hot, ceiling, [&] { return blaster_->PushHot(); }, [&] { return blaster_->PullHot(); }));

    RETURN_IF_ERROR(Book(
        &series->plain, ceiling, [&] { return plain_->PushPlain(); }, [&] { return plain_->PullPlain(); }));

    RETURN_IF_ERROR(Book(&series->server, ceiling, [&] { return worker_->Round(round, gradient_); }));
    RETURN_IF_ERROR(Book(&series->shared, ceiling, [&] { return shared_worker_->Round(round, gradient_); }));
    expected_->Apply(*gradient_);
    RETURN_IF_ERROR(expected_->Compare(worker_->parameters()));
    RETURN_IF_ERROR(expected_->Compare(shared_worker_->parameters()));

    ForgetPulled();
    RETURN_IF_ERROR(Book(
        &series->alone, ceiling, [&] { return alone_->Push(gradient_, round + 1); },
        [&] { return alone_->Pull(round + 1); }));
    return ComparePulled("stream alone");
  }

  void ForgetPulled() { std::fill(pulled_->begin(), pulled_->end(), -1.0f); }
  absl::Status ComparePulled(const char* path) const {
    for (size_t i = 0; i < elements_; ++i) {
      if ((*pulled_)[i] == (*gradient_)[i]) continue;
      return absl::DataLossError(
          absl::StrCat(path, ": element ", i, " is ", (*pulled_)[i], ", expected ", (*gradient_)[i]));
    }
    return absl::OkStatus();
  }

  const TransferShape shape_;
  const int report_, control_;
  const size_t elements_;
  const SharedValues gradient_ = std::make_shared<std::vector<float>>(elements_);
  const SharedValues pulled_ = std::make_shared<std::vector<float>>(elements_);
  uint64_t round_ = 0;
  GrpcTransport transport_;
  std::unique_ptr<Blaster> blaster_, plain_;  // SO_RCVLOWAT leaves its traces in a socket
  std::unique_ptr<StreamAlone> alone_;
  std::unique_ptr<ExpectedParameters> expected_;
  std::unique_ptr<BenchWorker> worker_, shared_worker_;
};

void Show(const Series& series, const TransferShape& shape, int pairs, int taken, bool pinned) {
  const bool noisy = series.spread() > kMaxSpread;
  const Path* const paths[] = {&series.place,  &series.hot,    &series.plain,
                               &series.server, &series.shared, &series.alone};
  if (absl::GetFlag(FLAGS_json)) {
    nlohmann::json json = {{"benchmark", "push_pull"},
                           {"machine", DateAndMachine()},
                           {"priority", PriorityName()},
                           {"pinned", pinned},
                           {"mib", shape.bytes >> 20},
                           {"chunk_kib", shape.chunk_bytes >> 10},
                           {"window_mib", shape.window_bytes >> 20},
                           {"pairs", pairs},
                           {"series", taken},
                           {"verified", true},
                           {"noisy", noisy}};
    for (const Path* path : paths) json["paths"][path->key] = path->Json();
    std::printf("%s\n", json.dump(2).c_str());
    return;
  }
  std::printf("%s, %s, %s\n", DateAndMachine().c_str(), PriorityName().c_str(),
              pinned ? "each end pinned to a core" : "NOT pinned: fewer than two cores");
  std::printf("%zu MiB of float32, chunks of %zu KiB, window %zu MiB; every element verified\n", shape.bytes >> 20,
              shape.chunk_bytes >> 10, shape.window_bytes >> 20);
  std::printf(
      "medians (quartiles) of %d interleaved pairs, series %d; GB/s of payload; ratios to TCP into place in the same "
      "pair\n\n",
      pairs, taken);
  std::printf(
      "| path | push | pull | push / TCP | pull / TCP | CPU s/GB, worker + server "
      "|\n|---|---|---|---|---|---|\n");
  for (const Path* path : paths) path->Print();
  if (noisy) {
    std::printf(
        "\nNOISY: the quartiles of TCP into place lie %.0f%% of its median apart: other programs use these cores\n",
        100 * series.spread());
  }
}

absl::Status Measure(const TransferShape& shape, int report, int control, bool pinned) {
  Ports ports;
  if (read(report, &ports, sizeof(ports)) != sizeof(ports)) {
    return absl::UnavailableError("the serving process did not start");
  }
  Bench bench(shape, report, control);
  RETURN_IF_ERROR(bench.Connect(ports));
  const int pairs = absl::GetFlag(FLAGS_pairs);
  ASSIGN_OR_RETURN(Series quietest, bench.Measure(pairs));
  int taken = 1;
  for (; taken < kMaxSeries && quietest.spread() > kMaxSpread; ++taken) {
    ASSIGN_OR_RETURN(Series again, bench.Measure(pairs));
    if (again.spread() < quietest.spread()) quietest = std::move(again);
  }
  Show(quietest, shape, pairs, taken, pinned);
  return absl::OkStatus();
}

// Writes an error down; the exit code.
int Ended(const absl::Status& status) {
  if (!status.ok()) LOG_ERROR("{}", status.ToString());
  return status.ok() ? 0 : 1;
}

int Main() {
  const int mib = absl::GetFlag(FLAGS_mib), chunk_kib = absl::GetFlag(FLAGS_chunk_kib);
  const int window_mib = absl::GetFlag(FLAGS_window_mib);
  if (mib < 1 || mib > 2048 || chunk_kib < 4 || chunk_kib > 32 << 10 || window_mib < 1 ||
      absl::GetFlag(FLAGS_pairs) < 1) {
    std::fprintf(stderr, "--mib 1 to 2048, --chunk_kib 4 to 32768, --window_mib and --pairs at least 1\n");
    return 2;
  }
  const TransferShape shape{static_cast<size_t>(mib) << 20, static_cast<size_t>(chunk_kib) << 10,
                            static_cast<size_t>(window_mib) << 20};
  TuneMalloc();
  int report[2], control[2];
  if (pipe(report) != 0 || pipe(control) != 0) return 1;
  const pid_t child = fork();  // before anything of gRPC exists
  if (child < 0) return 1;
  InitLog(child == 0 ? "server-0" : "worker-0", "warn");
  if (child == 0) {
    close(report[0]);
    close(control[1]);
    PinToCore(1);
    return Ended(Serve(shape, report[1], control[0]));
  }
  close(report[1]);
  close(control[0]);
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(allowed), &allowed);
  const bool pinned = CPU_COUNT(&allowed) >= 2 && PinToCore(0);
  const int code = Ended(Measure(shape, report[0], control[1], pinned));
  close(control[1]);
  int status = 0;
  waitpid(child, &status, 0);
  return code == 0 && (!WIFEXITED(status) || WEXITSTATUS(status) != 0) ? 1 : code;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return sluice::Main();
}
