// How fast ranks of a replica add up an array: all-reduce over the mail of workers (worker/peer_mail.h) through gRPC on
// loopback, with letters in the stream or in shared memory, beside the same collective over plain sockets in the same
// run (tcp_group.h).
//
//   bench_collectives [--ranks=2,4] [--kib=1,4,16,32,64,256,1024,4096,16384] [--pairs=7] [--seconds=0.2] [--json]
//
// Ranks are processes, pinned to the cores in turns. All paths are measured one after the other in each pair, for
// about --seconds; a time is from a barrier to the end of the last rank, by the number of all-reduces. Bus bandwidth:
// bytes that each rank sends at least, 2 (n-1)/n of the array, by the time (as NCCL's tests count it). Before and after
// every series each rank compares a sum with what it must be, element by element.
//
// Exit codes: 1: a value was wrong, or something failed; 2: usage.
#include "worker/parallel/collectives.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "bench/measure.h"
#include "bench/processes.h"
#include "bench/tcp_group.h"
#include "common/grpc_transport.h"
#include "common/job_spec.h"
#include "common/layout.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "nlohmann/json.hpp"
#include "sluice/v1/peer.grpc.pb.h"
#include "worker/mail_stream.h"
#include "worker/peer_mail.h"

using Strings = std::vector<std::string>;
ABSL_FLAG(Strings, ranks, Strings({"2", "4"}), "ranks of the group, 2 to 16");
ABSL_FLAG(Strings, kib, Strings({"1", "4", "16", "32", "64", "256", "1024", "4096", "16384"}),
          "KiB of the array, 1 to 1048576");
ABSL_FLAG(int, pairs, 7, "measurements of each path and size");
ABSL_FLAG(double, seconds, 0.2, "of a measurement, about");
ABSL_FLAG(bool, json, false, "print JSON instead of tables");

namespace sluice {
namespace {

using nlohmann::json;

enum Path : uint32_t { kTcp = 0, kMail = 1, kShared = 2, kPaths = 3 };
constexpr const char* kNames[] = {"plain sockets", "mail", "mail, shared memory"};
constexpr const char* kKeys[] = {"tcp", "mail", "shared_memory"};

// ---------------------------------------------------------------- a rank
struct Command {
  Path path;
  uint64_t floats, times;
};
struct Reply {
  double seconds = 0;  // of all times
  double cpu = 0;      // seconds of all threads
  bool right = false;
};

v1::NodeId NodeOf(uint32_t rank) {
  v1::NodeId node;
  node.set_name(absl::StrCat("worker-", rank));
  node.set_incarnation(1);
  return node;
}

absl::StatusOr<std::shared_ptr<const Layout>> MakeLayout(const std::string& job, const std::vector<int>& ports) {
  const uint32_t ranks = static_cast<uint32_t>(ports.size());
  v1::Plan plan;
  plan.set_job_id(job);
  plan.set_generation(1);
  plan.set_timeline(1);
  plan.set_chunk_elements(16384);
  plan.set_norm_block(16384);
  plan.set_shards(1);
  v1::Member* const member = plan.add_chains()->add_members();
  member->mutable_node()->set_name("server-0");
  member->set_since(1);
  for (uint32_t r = 0; r < ranks; ++r) {
    v1::Rank* const rank = plan.add_ranks();
    rank->set_tensor(r);
    *rank->mutable_node() = NodeOf(r);
    rank->set_address(absl::StrCat("127.0.0.1:", ports[r]));
    rank->set_host_id("here");
  }
  plan.set_discipline(v1::Plan::VERDICT);
  v1::JobSpec* const spec = plan.mutable_spec();
  v1::Gpt2Spec* const gpt2 = spec->mutable_model()->mutable_gpt2();  // whose layers so many ranks can share
  gpt2->set_layers(1);
  gpt2->set_heads(ranks);
  gpt2->set_width(ranks);
  gpt2->set_context(1);
  gpt2->set_vocabulary(ranks);
  spec->mutable_train()->set_rounds(1);
  spec->mutable_train()->set_batch(1);
  spec->mutable_optimizer()->mutable_sgd()->set_learning_rate(0.1);
  spec->mutable_parallel()->set_tensor(ranks);
  FillDefaults(spec);
  plan.set_hash(PlanHash(plan));
  return Layout::Make(std::move(plan));
}

class MailService final : public v1::PeerService::WithRawCallbackMethod_Mail<v1::PeerService::Service> {
 public:
  explicit MailService(Acceptor acceptor) : acceptor_(std::move(acceptor)) {}
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Mail(grpc::CallbackServerContext* context) override {
    return NewAcceptedStream(context, acceptor_);
  }

 private:
  const Acceptor acceptor_;
};

bool IsTheSum(Collectives& collectives, uint32_t rank, uint32_t ranks, uint64_t floats) {
  std::vector<float> x(floats);
  for (uint64_t i = 0; i < floats; ++i) x[i] = static_cast<float>(i % 1000 + rank);
  if (const absl::Status status = collectives.AllReduce(absl::MakeSpan(x)); !status.ok()) {
    LOG_ERROR("{}", status.ToString());
    return false;
  }
  for (uint64_t i = 0; i < floats; ++i) {
    if (x[i] != static_cast<float>(ranks * (i % 1000) + ranks * (ranks - 1) / 2)) return false;
  }
  return true;
}

absl::Status RunRank(uint32_t rank, const std::vector<int>& sockets, const Pipes& pipes) {
  const uint32_t ranks = static_cast<uint32_t>(sockets.size());
  PinToCore(static_cast<int>(rank % std::max(std::thread::hardware_concurrency(), 1U)));
  TcpGroup sockets_group(rank, sockets);

  GrpcTransport transport;
  absl::Mutex mutex;
  std::map<std::string, std::shared_ptr<PeerMail>> mails;  // by job
  MailService service(MakeMailAcceptor([&](const std::string& job) {
    absl::MutexLock lock(&mutex);
    const auto mail = mails.find(job);
    return mail == mails.end() ? nullptr : mail->second;
  }));
  ASSIGN_OR_RETURN(const auto server, GrpcServer::Start({}, {&service}));
  const int port = server->port();
  RETURN_IF_ERROR(WriteAll(pipes.report, &port, sizeof(port)));
  std::vector<int> ports(ranks);
  RETURN_IF_ERROR(ReadAll(pipes.control, ports.data(), ranks * sizeof(int)));
  std::vector<Collectives> paths = {Collectives(&sockets_group)};
  for (const Path path : {kMail, kShared}) {
    ASSIGN_OR_RETURN(const auto layout, MakeLayout(kKeys[path], ports));
    const PeerMailOptions options{
        .job_id = kKeys[path], .node = NodeOf(rank), .transport = &transport, .shared_memory = path == kShared};
    const auto mail = std::make_shared<PeerMail>(options, *layout, rank);
    mail->Begin(layout, rank);
    mail->StartRound(1, 0);
    paths.emplace_back(mail->tensor());
    absl::MutexLock lock(&mutex);
    mails[kKeys[path]] = mail;
  }
  for (Command command; ReadUnlessEnded(pipes.control, &command, sizeof(command));) {
    Collectives& collectives = paths[command.path];
    std::vector<float> x(command.floats);
    Reply reply;
    reply.right = IsTheSum(collectives, rank, ranks, command.floats);
    RETURN_IF_ERROR(collectives.AllReduce(absl::MakeSpan(x)));
    float ready = 1;
    RETURN_IF_ERROR(collectives.AllReduce(absl::MakeSpan(&ready, 1)));  // a barrier for sockets too
    const double cpu = CpuSeconds();
    const absl::Time from = absl::Now();
    for (uint64_t i = 0; i < command.times; ++i) RETURN_IF_ERROR(collectives.AllReduce(absl::MakeSpan(x)));
    reply.seconds = absl::ToDoubleSeconds(absl::Now() - from);
    reply.cpu = CpuSeconds() - cpu;
    reply.right = reply.right && IsTheSum(collectives, rank, ranks, command.floats);
    RETURN_IF_ERROR(WriteAll(pipes.report, &reply, sizeof(reply)));
  }
  for (const auto& [job, mail] : mails) mail->Stop();
  return absl::OkStatus();
}

// ---------------------------------------------------------------- the measuring process
class Ranks {
 public:
  static absl::StatusOr<std::unique_ptr<Ranks>> Start(uint32_t n) {
    ASSIGN_OR_RETURN(const auto sockets, ConnectAll(n));
    auto ranks = std::make_unique<Ranks>();
    for (uint32_t r = 0; r < n; ++r) {
      RETURN_IF_ERROR(ranks->processes_.Fork([&, r](const Pipes& pipes) { return RunRank(r, sockets[r], pipes); }));
    }
    for (const auto& row : sockets) {
      for (const int fd : row) {
        if (fd >= 0) close(fd);
      }
    }
    std::vector<int> ports(n);
    for (uint32_t r = 0; r < n; ++r)
      RETURN_IF_ERROR(ReadAll(ranks->processes_.pipes(r).report, &ports[r], sizeof(int)));
    for (uint32_t r = 0; r < n; ++r) {
      RETURN_IF_ERROR(WriteAll(ranks->processes_.pipes(r).control, ports.data(), n * sizeof(int)));
    }
    return ranks;
  }

  // Of the slowest rank; CPU of all.
  absl::StatusOr<Reply> Run(Path path, uint64_t floats, uint64_t times) {
    const Command command = {path, floats, times};
    for (size_t r = 0; r < processes_.size(); ++r) {
      RETURN_IF_ERROR(WriteAll(processes_.pipes(r).control, &command, sizeof(command)));
    }
    Reply all = {.right = true};
    for (size_t r = 0; r < processes_.size(); ++r) {
      Reply one;
      RETURN_IF_ERROR(ReadAll(processes_.pipes(r).report, &one, sizeof(one)));
      all.seconds = std::max(all.seconds, one.seconds);
      all.cpu += one.cpu;
      all.right = all.right && one.right;
    }
    if (!all.right) return absl::DataLossError(absl::StrCat("a wrong sum of ", floats, " floats over ", kNames[path]));
    return all;
  }

 private:
  Processes processes_;
};

absl::StatusOr<json> MeasureSize(Ranks* ranks, uint32_t n, uint64_t kib, bool text) {
  const uint64_t floats = kib * 256;
  const double bus_bytes = 2.0 * (n - 1) / n * static_cast<double>(kib) * 1024;
  std::vector<double> seconds[kPaths], cpu[kPaths], ratio[kPaths];
  uint64_t times[kPaths];
  for (uint32_t path = 0; path < kPaths; ++path) {  // also warms up
    uint64_t count = 2;
    for (double took = 0;; count *= 4) {
      ASSIGN_OR_RETURN(const Reply reply, ranks->Run(static_cast<Path>(path), floats, count));
      took = reply.seconds;
      if (took < absl::GetFlag(FLAGS_seconds) / 8) continue;
      count = static_cast<uint64_t>(static_cast<double>(count) * absl::GetFlag(FLAGS_seconds) / took);
      break;
    }
    times[path] = std::max<uint64_t>(count, 1);
  }
  for (int pair = 0; pair < absl::GetFlag(FLAGS_pairs); ++pair) {
    for (uint32_t path = 0; path < kPaths; ++path) {
      ASSIGN_OR_RETURN(const Reply reply, ranks->Run(static_cast<Path>(path), floats, times[path]));
      seconds[path].push_back(reply.seconds / static_cast<double>(times[path]));
      cpu[path].push_back(reply.cpu / static_cast<double>(times[path]));
      ratio[path].push_back(seconds[kTcp].back() / seconds[path].back());
    }
  }
  json row = {{"ranks", n}, {"kib", kib}, {"verified", true}};
  for (uint32_t path = 0; path < kPaths; ++path) {
    const Quartiles q = QuartilesOf(seconds[path]), r = QuartilesOf(ratio[path]);
    row[kKeys[path]] = {{"seconds", q.median},  {"seconds_q1", q.low},
                        {"seconds_q3", q.high}, {"bus_gb_per_s", bus_bytes / q.median / 1e9},
                        {"ratio", r.median},    {"ratio_q1", r.low},
                        {"ratio_q3", r.high},   {"cpu_s", QuartilesOf(cpu[path]).median}};
  }
  if (text) {
    for (uint32_t path = 0; path < kPaths; ++path) {
      const Quartiles q = QuartilesOf(seconds[path]), r = QuartilesOf(ratio[path]);
      std::printf("| %u | %lu | %s | %.1f (%.1f-%.1f) | %.3f | %.2f (%.2f-%.2f) | %.0f |\n", n, kib, kNames[path],
                  1e6 * q.median, 1e6 * q.low, 1e6 * q.high, bus_bytes / q.median / 1e9, r.median, r.low, r.high,
                  1e6 * QuartilesOf(cpu[path]).median);
    }
    std::fflush(stdout);
  }
  return row;
}

absl::StatusOr<std::vector<uint64_t>> Numbers(const char* flag, const Strings& texts, uint64_t least, uint64_t most) {
  std::vector<uint64_t> numbers;
  for (const std::string& text : texts) {
    uint64_t number = 0;
    if (!absl::SimpleAtoi(text, &number) || number < least || number > most) {
      return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", text, ": expected ", least, " to ", most));
    }
    numbers.push_back(number);
  }
  return numbers;
}

absl::Status Measure() {
  ASSIGN_OR_RETURN(const auto groups, Numbers("ranks", absl::GetFlag(FLAGS_ranks), 2, 16));
  ASSIGN_OR_RETURN(const auto sizes, Numbers("kib", absl::GetFlag(FLAGS_kib), 1, 1 << 20));
  if (absl::GetFlag(FLAGS_pairs) < 1) return absl::InvalidArgumentError("--pairs: at least 1");
  const bool text = !absl::GetFlag(FLAGS_json);
  if (text) {
    std::printf("%s, %s, ranks pinned to the cores in turns\n\n", DateAndMachine().c_str(), PriorityName().c_str());
    std::printf(
        "All-reduce of float32; every sum verified; medians (quartiles) of %d interleaved pairs of about %g s a "
        "path\n\n",
        absl::GetFlag(FLAGS_pairs), absl::GetFlag(FLAGS_seconds));
    std::printf(
        "| ranks | KiB | path | us | bus GB/s | of plain sockets | CPU us, all ranks "
        "|\n|---|---|---|---|---|---|---|\n");
  }
  json rows = json::array();
  for (const uint64_t n : groups) {
    ASSIGN_OR_RETURN(const auto ranks, Ranks::Start(static_cast<uint32_t>(n)));
    for (const uint64_t kib : sizes) {
      ASSIGN_OR_RETURN(const json row, MeasureSize(ranks.get(), static_cast<uint32_t>(n), kib, text));
      rows.push_back(row);
    }
  }
  if (!text) {
    const json all = {{"benchmark", "collectives"},
                      {"machine", DateAndMachine()},
                      {"priority", PriorityName()},
                      {"pairs", absl::GetFlag(FLAGS_pairs)},
                      {"seconds", absl::GetFlag(FLAGS_seconds)},
                      {"rows", rows}};
    std::printf("%s\n", all.dump(2).c_str());
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return sluice::RunBench("bench_collectives", sluice::Measure);
}
