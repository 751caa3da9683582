#include "bench/round_nodes.h"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/measure.h"
#include "bench/parameter_server.h"
#include "bench/processes.h"
#include "common/clock.h"
#include "common/grpc_transport.h"
#include "common/log.h"
#include "common/philox.h"
#include "common/rpc.h"
#include "common/status_macros.h"
#include "worker/train_loop.h"
#include "worker/worker_job.h"

namespace sluice {
namespace {

constexpr uint64_t kWarmUp = 3;  // rounds

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
  for (char byte; ReadUnlessEnded(pipes.control, &byte, 1);) {
    const Said said{.is_cpu = true, .seconds = CpuSeconds()};
    if (!WriteAll(pipes.report, &said, sizeof(said)).ok()) return;
  }
}

std::string ServerHost(const RoundJob& job, uint32_t number) {
  return job.server_places.empty() ? "127.0.0.1" : job.server_places.at(number).host;
}

absl::StatusOr<std::vector<std::string>> ReadAddresses(const RoundJob& job, int from) {
  std::vector<int> ports(job.servers);
  RETURN_IF_ERROR(ReadAll(from, ports.data(), ports.size() * sizeof(int)));
  std::vector<std::string> addresses;
  for (uint32_t i = 0; i < job.servers; ++i) addresses.push_back(HostPort{ServerHost(job, i), ports[i]}.ToString());
  return addresses;
}

// ---------------------------------------------------------------- a server
absl::Status Serve(const RoundJob& job, uint32_t number, const Pipes& pipes) {
  ASSIGN_OR_RETURN(const auto server, BenchServer::Listen(ServerHost(job, number)));
  const int port = server->port();
  RETURN_IF_ERROR(WriteAll(pipes.report, &port, sizeof(port)));
  ASSIGN_OR_RETURN(const std::vector<std::string> addresses, ReadAddresses(job, pipes.control));
  ASSIGN_OR_RETURN(const auto layout, MakeRoundLayout(job, addresses));
  const auto say = [&pipes](const v1::RoundRecord& record) {
    if (record.evaluation()) return;
    Said said{.round = record.round(), .seconds = record.seconds()};
    for (const v1::RankTime& time : record.times()) {
      said.compute += time.compute() / record.times_size();
      said.exposed += time.exposed() / record.times_size();
      said.others += time.others() / record.times_size();
      said.verdict += time.verdict() / record.times_size();
    }
    WriteAll(pipes.report, &said, sizeof(said)).IgnoreError();
  };
  RETURN_IF_ERROR(server->Serve(layout, RoundNode("server", number), job.shared_memory, say));
  AnswerCpu(pipes);
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
  options.make_model = [&](const v1::JobSpec& spec, const ModelPart&) {
    return MakeRoundModel(job, spec.model(), backend.get());
  };
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
class RoundProcesses : public Processes {
 public:
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
  std::map<size_t, std::deque<Said>> rounds_;  // said while CPU time was asked for
};

}  // namespace

absl::StatusOr<RoundResult> RunRounds(const RoundJob& job, bool alone) {
  const uint32_t servers = alone ? 0 : job.servers;
  RoundProcesses processes;
  for (uint32_t i = 0; i < servers; ++i) {
    RETURN_IF_ERROR(processes.Fork([&](const Pipes& pipes) -> absl::Status {
      if (!job.server_places.empty()) RETURN_IF_ERROR(EnterNetwork(job.server_places.at(i)));
      return Serve(job, i, pipes);
    }));
  }
  for (uint32_t i = 0; i < job.workers; ++i) {
    RETURN_IF_ERROR(processes.Fork([&](const Pipes& pipes) -> absl::Status {
      if (!job.worker_places.empty()) RETURN_IF_ERROR(EnterNetwork(job.worker_places.at(i)));
      return alone ? WorkAlone(job, i, pipes) : WorkTogether(job, i, pipes);
    }));
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
