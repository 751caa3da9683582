#include "bench/round_nodes.h"

#include <grpc/grpc.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/measure.h"
#include "common/clock.h"
#include "common/frame.h"
#include "common/grpc_transport.h"
#include "common/log.h"
#include "common/philox.h"
#include "common/rpc.h"
#include "common/status_macros.h"
#include "server/server_node.h"
#include "server/services.h"
#include "sluice/v1/scheduler.grpc.pb.h"
#include "worker/train_loop.h"
#include "worker/worker_job.h"

namespace sluice {
namespace {

constexpr uint64_t kWarmUp = 3;  // rounds
constexpr int kPatienceMs = 120000;

// ---------------------------------------------------------------- pipes
absl::Status WriteAll(int to, const void* data, size_t bytes) {
  for (const char* at = static_cast<const char*>(data); bytes > 0;) {
    const ssize_t n = write(to, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return absl::UnavailableError("a process of the measurement is gone");
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

absl::Status ReadAll(int from, void* data, size_t bytes) {
  for (char* at = static_cast<char*>(data); bytes > 0;) {
    pollfd ready = {from, POLLIN, 0};
    const int some = poll(&ready, 1, kPatienceMs);
    if (some < 0 && errno == EINTR) continue;
    if (some == 0) return absl::DeadlineExceededError("no round for two minutes");
    const ssize_t n = read(from, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return absl::UnavailableError("a process of the measurement is gone");
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

struct Pipes {
  int report = -1, control = -1;  // to the measuring process; from it
};

// What processes say, each in one write: of a round that has ended, or when they are asked for their CPU seconds.
struct Said {
  bool is_cpu = false;
  uint64_t round = 0;
  double seconds = 0;  // of the round, or of CPU time
  double compute = 0, exposed = 0, others = 0, verdict = 0;
  double cpu = 0;  // alone: of the process so far
};

// Each byte asks for the CPU seconds; the pipe's end is the end.
void AnswerCpu(const Pipes& pipes) {
  for (char byte;;) {
    const ssize_t n = read(pipes.control, &byte, 1);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    const Said said{.is_cpu = true, .seconds = CpuSeconds()};
    if (!WriteAll(pipes.report, &said, sizeof(said)).ok()) return;
  }
}

absl::StatusOr<std::vector<std::string>> ReadAddresses(const RoundJob& job, int from) {
  std::vector<int> ports(job.servers);
  RETURN_IF_ERROR(ReadAll(from, ports.data(), ports.size() * sizeof(int)));
  std::vector<std::string> addresses;
  for (const int port : ports) addresses.push_back(HostPort{"127.0.0.1", port}.ToString());
  return addresses;
}

// ---------------------------------------------------------------- a server
// What the server hears from its scheduler; round records go to the measuring process.
class SchedulerEnd : public StreamHandler {
 public:
  SchedulerEnd(std::shared_ptr<ByteStream> stream, std::shared_ptr<const Layout> layout, int report)
      : stream_(std::move(stream)), layout_(std::move(layout)), report_(report) {}

  void OnMessage(grpc::ByteBuffer buffer) override {
    v1::NodeMessage message;
    if (!DecodeMessage(buffer, &message)) return stream_->Close(absl::InvalidArgumentError("not a NodeMessage"));
    if (message.has_problem()) LOG_ERROR("the server reports: {}", message.problem().message());
    if (message.has_round_record() && !message.round_record().evaluation()) Say(message.round_record());
    if (!message.has_register_()) return;
    v1::SchedulerMessage welcome, plan;
    welcome.mutable_welcome()->set_lease_ms(60000);
    stream_->Write(EncodeMessage(welcome));
    *plan.mutable_plan() = layout_->plan();
    stream_->Write(EncodeMessage(plan));
  }
  void OnClosed(const absl::Status&) override { stream_ = nullptr; }

 private:
  void Say(const v1::RoundRecord& record) const {
    Said said{.round = record.round(), .seconds = record.seconds()};
    for (const v1::ReplicaTime& time : record.times()) {
      said.compute += time.compute() / record.times_size();
      said.exposed += time.exposed() / record.times_size();
      said.others += time.others() / record.times_size();
      said.verdict += time.verdict() / record.times_size();
    }
    WriteAll(report_, &said, sizeof(said)).IgnoreError();
  }

  std::shared_ptr<ByteStream> stream_;
  const std::shared_ptr<const Layout> layout_;
  const int report_;
};

class SessionService final : public v1::SchedulerService::WithRawCallbackMethod_Session<v1::SchedulerService::Service> {
 public:
  SessionService(std::shared_ptr<const Layout> layout, int report)
      : acceptor_([layout = std::move(layout), report](std::shared_ptr<ByteStream> stream, const std::string&) {
          return std::make_shared<SchedulerEnd>(std::move(stream), layout, report);
        }) {}
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Session(grpc::CallbackServerContext* context) override {
    return NewAcceptedStream(context, acceptor_);
  }

 private:
  const Acceptor acceptor_;
};

absl::Status Serve(const RoundJob& job, uint32_t number, const Pipes& pipes) {
  ParameterServiceImpl parameter_service;
  ShardServiceImpl shard_service;
  ASSIGN_OR_RETURN(const auto listener, GrpcServer::Start({}, {&parameter_service, &shard_service}));
  const int port = listener->port();
  RETURN_IF_ERROR(WriteAll(pipes.report, &port, sizeof(port)));
  ASSIGN_OR_RETURN(const std::vector<std::string> addresses, ReadAddresses(job, pipes.control));
  ASSIGN_OR_RETURN(const auto layout, MakeRoundLayout(job, addresses));
  SessionService sessions(layout, pipes.report);
  ASSIGN_OR_RETURN(const auto scheduler, GrpcServer::Start({}, {&sessions}));
  GrpcTransport transport;
  ServerOptions options;
  options.node = RoundNode("server", number);
  options.address = listener->address();
  options.scheduler = scheduler->address();
  options.lanes = 1;
  options.shared_memory = job.shared_memory;
  options.transport = &transport;
  options.on_refused = [](const absl::Status& status) { LOG_ERROR("refused: {}", status.ToString()); };
  std::unique_ptr<ServerNode> node = ServerNode::Start(options);
  parameter_service.SetNode(node.get());
  shard_service.SetNode(node.get());
  AnswerCpu(pipes);
  listener->Shutdown();
  node = nullptr;
  scheduler->Shutdown();
  return absl::OkStatus();
}

// ---------------------------------------------------------------- a worker
absl::Status WorkTogether(const RoundJob& job, uint32_t number, const Pipes& pipes) {
  ASSIGN_OR_RETURN(const std::vector<std::string> addresses, ReadAddresses(job, pipes.control));
  ASSIGN_OR_RETURN(const auto layout, MakeRoundLayout(job, addresses));
  ASSIGN_OR_RETURN(const auto backend, MakeBackend({}));
  GrpcTransport transport;
  RealClock clock;
  WorkerJobOptions options;
  options.node = RoundNode("worker", number);
  options.transport = &transport;
  options.clock = &clock;
  options.shared_memory = job.shared_memory;
  options.send = [](const v1::NodeMessage& message) { LOG_ERROR("the worker says: {}", message.ShortDebugString()); };
  options.open_dataset = [&job](const v1::JobSpec&) { return MakeRoundData(job); };
  options.make_model = [&](const v1::ModelSpec& spec) { return MakeRoundModel(job, spec, backend.get()); };
  WorkerJob worker(options, layout, number);
  std::thread thread([&worker] { worker.Run(); });
  AnswerCpu(pipes);
  worker.End();
  thread.join();
  return absl::OkStatus();
}

// Every round at once; gradients go nowhere.
class RoundsAlone : public Rounds {
 public:
  RoundsAlone(const RoundJob& job, const Layout& layout, uint32_t number, const Pipes& pipes)
      : job_(job), layout_(layout), number_(number), pipes_(pipes) {}

  Work Next() override {
    const absl::Time now = absl::Now();
    if (round_ > 0) {
      const Said said{.round = round_ - 1, .seconds = absl::ToDoubleSeconds(now - begun_), .cpu = CpuSeconds()};
      WriteAll(pipes_.report, &said, sizeof(said)).IgnoreError();
    }
    begun_ = now;
    if (round_ == job_.rounds + kWarmUp) return Work();
    const uint64_t round = round_++;
    return {.kind = Work::kTrain,
            .generation = 1,
            .round = round,
            .replica = number_,
            .replicas = job_.workers,
            .positions = TrainPositions(layout_.plan().spec().train(), round, number_, job_.workers),
            .cancel = &cancel_};
  }
  absl::Status ParametersNeeded(const Work&, Range) override { return absl::OkStatus(); }
  void Begin(const Work&, double) override {}
  void GradientReady(const Work&, Range) override {}
  void Done(const Work&, const LossSum&, double) override {}
  void Stopped(const Work&) override {}

 private:
  const RoundJob& job_;
  const Layout& layout_;
  const uint32_t number_;
  const Pipes pipes_;
  const std::atomic<bool> cancel_ = false;
  uint64_t round_ = 0;
  absl::Time begun_;
};

absl::Status WorkAlone(const RoundJob& job, uint32_t number, const Pipes& pipes) {
  ASSIGN_OR_RETURN(const auto layout, MakeRoundLayout(job, {"127.0.0.1:1"}));
  ASSIGN_OR_RETURN(const auto backend, MakeBackend({}));
  const auto data = MakeRoundData(job);
  ASSIGN_OR_RETURN(const auto model, MakeRoundModel(job, layout->plan().spec().model(), backend.get()));
  for (const Tensor& tensor : model->space().tensors()) {
    FillInitial(tensor, 1, 0, tensor.elements, model->parameters() + tensor.offset);
  }
  RealClock clock;
  RoundsAlone rounds(job, *layout, number, pipes);
  absl::Status status;
  std::thread thread([&] {
    status =
        TrainLoop("bench", layout->plan().spec(), data.get(), model.get(), &rounds, &clock, /*hooks=*/nullptr).Run();
  });
  AnswerCpu(pipes);
  thread.join();
  return status;
}

// ---------------------------------------------------------------- the measuring process
class Processes {
 public:
  using Body = std::function<absl::Status(const Pipes&)>;

  ~Processes() {
    for (const auto& [pid, pipes] : children_) close(pipes.control);
    for (const auto& [pid, pipes] : children_) {
      // In order, unless it does not come to an end.
      int state = 0;
      for (int i = 0; i < 1000 && waitpid(pid, &state, WNOHANG) == 0; ++i) usleep(10000);
      kill(pid, SIGKILL);
      waitpid(pid, &state, 0);
      close(pipes.report);
    }
  }

  absl::Status Fork(const Body& body) {
    std::fflush(stdout);  // else it would be printed by both
    int report[2], control[2];
    if (pipe(report) != 0 || pipe(control) != 0) return absl::ErrnoToStatus(errno, "pipe");
    const pid_t parent = getpid(), pid = fork();
    if (pid < 0) return absl::ErrnoToStatus(errno, "fork");
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
      close(report[0]);
      close(control[1]);
      for (const auto& [other, pipes] : children_) {
        close(pipes.control);
        close(pipes.report);
      }
      dup2(STDERR_FILENO, STDOUT_FILENO);  // the log; results are the parent's
      grpc_init();  // never undone: gRPC's own end can wait 10 s for a timer, and this process just goes
      const absl::Status status = body({.report = report[1], .control = control[0]});
      if (!status.ok()) LOG_ERROR("{}", status.ToString());
      _exit(status.ok() ? 0 : 1);
    }
    close(report[1]);
    close(control[0]);
    children_.push_back({pid, {.report = report[0], .control = control[1]}});
    return absl::OkStatus();
  }

  const Pipes& pipes(size_t i) const { return children_.at(i).second; }

  absl::StatusOr<Said> NextRound(size_t i) {
    Said said;
    if (std::deque<Said>& earlier = rounds_[i]; !earlier.empty()) {
      said = earlier.front();
      earlier.pop_front();
      return said;
    }
    RETURN_IF_ERROR(ReadAll(pipes(i).report, &said, sizeof(said)));
    return said;
  }

  // Of children [first, last).
  absl::StatusOr<double> Cpu(size_t first, size_t last) {
    double sum = 0;
    for (size_t i = first; i < last; ++i) {
      RETURN_IF_ERROR(WriteAll(pipes(i).control, "c", 1));
      for (Said said; !said.is_cpu;) {
        RETURN_IF_ERROR(ReadAll(pipes(i).report, &said, sizeof(said)));
        if (said.is_cpu) sum += said.seconds;
        if (!said.is_cpu) rounds_[i].push_back(said);
      }
    }
    return sum;
  }

 private:
  std::vector<std::pair<pid_t, Pipes>> children_;
  std::map<size_t, std::deque<Said>> rounds_;  // said while CPU time was asked for
};

}  // namespace

absl::StatusOr<RoundResult> RunRounds(const RoundJob& job, bool alone) {
  const uint32_t servers = alone ? 0 : job.servers;
  Processes processes;
  for (uint32_t i = 0; i < servers; ++i) {
    RETURN_IF_ERROR(processes.Fork([&](const Pipes& pipes) { return Serve(job, i, pipes); }));
  }
  for (uint32_t i = 0; i < job.workers; ++i) {
    RETURN_IF_ERROR(processes.Fork(
        [&](const Pipes& pipes) { return alone ? WorkAlone(job, i, pipes) : WorkTogether(job, i, pipes); }));
  }
  std::vector<int> ports(servers);
  for (uint32_t i = 0; i < servers; ++i) {
    RETURN_IF_ERROR(ReadAll(processes.pipes(i).report, &ports[i], sizeof(int)));
  }
  for (uint32_t i = 0; !alone && i < servers + job.workers; ++i) {
    RETURN_IF_ERROR(WriteAll(processes.pipes(i).control, ports.data(), ports.size() * sizeof(int)));
  }
  // Alone every worker tells its own rounds, else the verdict holder tells them.
  RoundResult result;
  const size_t telling = alone ? job.workers : 1;
  const double part = 1.0 / static_cast<double>(job.rounds) / static_cast<double>(telling);
  double workers = 0, workers_end = 0, all_servers = 0;
  for (uint64_t round = 0; round < kWarmUp + job.rounds; ++round) {
    if (round == kWarmUp && !alone) {
      ASSIGN_OR_RETURN(workers, processes.Cpu(servers, servers + job.workers));
      ASSIGN_OR_RETURN(all_servers, processes.Cpu(0, servers));
    }
    double slowest = 0, cpu = 0;
    for (size_t i = 0; i < telling; ++i) {
      ASSIGN_OR_RETURN(const Said said, processes.NextRound(i));
      if (said.round != round) return absl::InternalError(absl::StrCat("round ", said.round, " after ", round));
      slowest = std::max(slowest, said.seconds);
      cpu += said.cpu;
      if (round < kWarmUp) continue;
      result.compute += said.compute * part;
      result.exposed += said.exposed * part;
      result.others += said.others * part;
      result.verdict += said.verdict * part;
    }
    if (alone && round + 1 == kWarmUp) workers = cpu;
    if (alone) workers_end = cpu;
    if (round >= kWarmUp) result.seconds.push_back(slowest);
  }
  if (!alone) {
    ASSIGN_OR_RETURN(workers_end, processes.Cpu(servers, servers + job.workers));
  }
  ASSIGN_OR_RETURN(const double servers_end, processes.Cpu(0, servers));
  result.worker_cpu = (workers_end - workers) / static_cast<double>(job.rounds);
  result.server_cpu = (servers_end - all_servers) / static_cast<double>(job.rounds);
  return result;
}

}  // namespace sluice
