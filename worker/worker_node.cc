#include "worker/worker_node.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "common/version.h"
#include "worker/mail_stream.h"
#include "worker/peer_stream.h"
#include "worker/worker_job.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<WorkerNode>> WorkerNode::Start(const WorkerOptions& options) {
  ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, MakeBackend(options.backend));
  std::unique_ptr<WorkerNode> node(new WorkerNode(options, std::move(backend)));
  WorkerNode* self = node.get();
  Session::Callbacks callbacks;
  callbacks.make_register = [self] { return self->MakeRegister(); };
  callbacks.on_message = [self](const v1::SchedulerMessage& message) { self->OnMessage(message); };
  callbacks.on_refused = [self](const absl::Status& status) {
    LOG_ERROR("the scheduler at {} refused this worker: {}", self->options_.scheduler, status.ToString());
    if (self->options_.on_refused) self->options_.on_refused(status);
  };
  node->session_ = Session::Start(options.transport, options.scheduler, std::move(callbacks));
  node->started_.Notify();
  return node;
}

WorkerNode::WorkerNode(const WorkerOptions& options, std::unique_ptr<Backend> backend)
    : options_(options), backend_(std::move(backend)), train_thread_([this] { TrainThread(); }) {}

WorkerNode::~WorkerNode() {
  std::shared_ptr<WorkerJob> running;
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
    running = job_;
    assigned_ = nullptr;
  }
  if (running != nullptr) running->End();
  train_thread_.join();
  running = nullptr;
  session_ = nullptr;  // no callback after this
}

void WorkerNode::Leave() {
  v1::NodeMessage message;
  message.mutable_leaving();
  session_->Send(message);
}

Acceptor WorkerNode::peer_acceptor() {
  return MakePeerAcceptor(
      [this](const std::string& job_id) {
        std::shared_ptr<WorkerJob> job = Newest();
        return job != nullptr && job->id() == job_id ? job : nullptr;
      },
      options_.shared_memory);
}

Acceptor WorkerNode::mail_acceptor() {
  return MakeMailAcceptor([this](const std::string& job_id) {
    const std::shared_ptr<WorkerJob> job = Newest();
    return job != nullptr && job->id() == job_id ? job->mail() : nullptr;
  });
}

std::string WorkerNode::job() const {
  const std::shared_ptr<WorkerJob> job = Newest();
  return job != nullptr ? job->id() : "";
}

std::shared_ptr<WorkerJob> WorkerNode::Newest() const {
  absl::MutexLock lock(&mutex_);
  const std::shared_ptr<WorkerJob>& job = assigned_ != nullptr ? assigned_ : job_;
  return job != nullptr && !job->ended() ? job : nullptr;
}

// ---------------------------------------------------------------- the session
v1::Register WorkerNode::MakeRegister() const {
  v1::Register message;
  message.set_protocol_version(kProtocolVersion);
  message.set_build_id(kVersion);
  message.set_role(v1::WORKER);
  *message.mutable_node() = options_.node;
  message.set_host_id(options_.host_id);
  message.set_address(options_.address);
  message.set_numeric_profile(backend_->numeric_profile());
  message.set_memory_limit(options_.memory_limit);
  message.set_serves_peers(options_.serves_peers);
  message.set_sums_on_host(options_.serves_peers && options_.shared_memory);
  if (const std::shared_ptr<WorkerJob> job = Newest(); job != nullptr) {
    v1::JobGeneration* held = message.add_jobs();
    held->set_job_id(job->id());
    held->set_generation(job->generation());
  }
  return message;
}

void WorkerNode::OnMessage(const v1::SchedulerMessage& message) {
  started_.WaitForNotification();  // session_ is set: what follows may send
  switch (message.kind_case()) {
    case v1::SchedulerMessage::kWelcome:
      LOG_INFO("registered with the scheduler at {}", options_.scheduler);
      if (const std::shared_ptr<WorkerJob> job = Newest(); job != nullptr) job->Repeat();
      break;
    case v1::SchedulerMessage::kPlan:
      OnPlan(message.plan());
      break;
    case v1::SchedulerMessage::kEndJob:
      OnEndJob(message.end_job().job_id());
      break;
    default:
      break;  // fences and checkpoint orders are for servers
  }
}

void WorkerNode::OnPlan(const v1::Plan& plan) {
  const absl::StatusOr<std::shared_ptr<const Layout>> layout = Layout::Make(plan);
  if (!layout.ok()) {
    LOG_ERROR("job {}: the plan of generation {} cannot be used: {}", plan.job_id(), plan.generation(),
              layout.status().ToString());
    v1::NodeMessage message;
    v1::NodeProblem* problem = message.mutable_problem();
    problem->set_job_id(plan.job_id());
    problem->set_generation(plan.generation());
    problem->set_code(static_cast<int>(layout.status().code()));
    problem->set_message(std::string(layout.status().message()));
    session_->Send(message);
    return;
  }
  const int rank = (*layout)->RankOf(options_.node);
  const std::shared_ptr<WorkerJob> newest = Newest();
  if (rank >= 0 && newest != nullptr && newest->id() == plan.job_id() &&
      newest->SamePart(**layout, static_cast<uint32_t>(rank))) {
    newest->OnPlan(*layout, static_cast<uint32_t>(rank));
    return;
  }
  if (newest != nullptr && (rank >= 0 || newest->id() == plan.job_id())) newest->End();
  if (rank < 0) return;

  WorkerJobOptions options;
  options.node = options_.node;
  options.rules = options_.rules;
  options.transport = options_.transport;
  options.clock = options_.clock;
  options.hooks = options_.hooks;
  options.shared_memory = options_.shared_memory;
  options.send = [this](const v1::NodeMessage& message) { session_->Send(message); };
  options.open_dataset = [this](const v1::JobSpec& spec) {
    return OpenDataset(spec, options_.data_root, options_.data_cache);
  };
  options.make_model = [this](const v1::JobSpec& spec, const ModelPart& part) {
    return MakeModel(spec.model(), backend_.get(), part);
  };
  auto job = std::make_shared<WorkerJob>(options, *layout, static_cast<uint32_t>(rank));
  absl::MutexLock lock(&mutex_);
  if (!ending_) assigned_.swap(job);
}

void WorkerNode::OnEndJob(const std::string& job_id) {
  std::shared_ptr<WorkerJob> ended;
  {
    absl::MutexLock lock(&mutex_);
    if (assigned_ != nullptr && assigned_->id() == job_id) {
      ended = std::move(assigned_);
      assigned_ = nullptr;
    } else if (job_ != nullptr && job_->id() == job_id) {
      ended = job_;
    }
  }
  if (ended != nullptr) ended->End();
}

// ---------------------------------------------------------------- work
void WorkerNode::TrainThread() {
  for (;;) {
    std::shared_ptr<WorkerJob> job;
    {
      absl::MutexLock lock(&mutex_);
      job_ = nullptr;
      const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ending_ || assigned_ != nullptr; };
      mutex_.Await(absl::Condition(&ready));
      if (ending_) return;
      job_ = std::move(assigned_);
      assigned_ = nullptr;
      job = job_;
    }
    LOG_INFO("job {}: assigned", job->id());
    job->Run();
    LOG_INFO("job {}: ended", job->id());
  }
}

}  // namespace sluice
