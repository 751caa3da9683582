#include "scheduler/scheduler_core.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/version.h"

namespace sluice {
namespace {

bool IsServer(const KnownNode& node) { return node.info.role() == v1::SERVER; }

}  // namespace

SchedulerCore::SchedulerCore(SchedulerCoreOptions options, SchedulerActions* actions)
    : options_(std::move(options)), actions_(actions) {}

void SchedulerCore::Restore(std::vector<v1::StoredJob> rows, absl::Time now) {
  last_event_ = now;
  for (v1::StoredJob& row : rows) {
    const uint64_t sequence = row.sequence();
    JobEntry& job = jobs_[sequence];
    job.row = std::move(row);
    if (const auto space = MakeParameterSpace(job.spec().model()); space.ok()) job.parameters = space->size();
    const uint64_t forced = job.spec().parallel().chunk_elements();
    job.chunk_elements = forced > 0 ? forced : DefaultChunkElements(job.parameters);
    job.rank_bytes = RankBytes(job.spec());
    for (const v1::NodeId& node : job.row.lost()) job.lost.insert(KeyOf(node));
    by_id_[job.id()] = sequence;
    if (!job.row.request_id().empty()) by_request_[job.row.request_id()] = sequence;
    if (job.started() && !job.ended()) grace_until_ = now + options_.lease;
  }
}

bool SchedulerCore::GraceOver(absl::Time) const { return grace_until_ == absl::InfinitePast(); }

void SchedulerCore::EndGrace(absl::Time now) {
  grace_until_ = absl::InfinitePast();
  for (auto& [sequence, job] : jobs_) {
    if (!job.started() || job.ended()) continue;
    for (const NodeKey& key : PlanNodes(job.plan())) {
      if (Here(key)) continue;
      job.lost.insert(key);
      job.trouble.insert(key.name);
      job.trouble_since = std::min(job.trouble_since, now);
    }
  }
  ConsiderAll(now);
  for (auto& [sequence, job] : jobs_) {
    if (job.row.order() && job.ordered_version == 0 && job.started() && !job.ended() && !job.transition) {
      SendOrder(job, now);
    }
  }
}

// ------------------------------------------------------------------------------------------------------ sessions
void SchedulerCore::OnMessage(SessionId session, const v1::NodeMessage& message, absl::Time now) {
  last_event_ = now;
  if (left_.count(session) > 0) return;
  const auto known = sessions_.find(session);
  if (known == sessions_.end()) {
    if (message.has_register_()) return OnRegister(session, message.register_(), now);
    return actions_->CloseSession(session,
                                  absl::InvalidArgumentError("the first message of a session must be Register"));
  }
  const NodeKey key = known->second;
  KnownNode& node = nodes_.at(key);
  node.heard = now;
  Dispatch(key, node, message, now);
}

void SchedulerCore::Dispatch(const NodeKey& from, KnownNode& node, const v1::NodeMessage& message, absl::Time now) {
  switch (message.kind_case()) {
    case v1::NodeMessage::kHeartbeat:
      return;
    case v1::NodeMessage::kFenceReport:
      return OnFenceReport(from, message.fence_report(), now);
    case v1::NodeMessage::kShardProgress:
      return OnShardProgress(from, message.shard_progress(), now);
    case v1::NodeMessage::kRoundRecord:
      return OnRoundRecord(from, message.round_record(), now);
    case v1::NodeMessage::kSnapshotDone:
      return OnSnapshotDone(from, message.snapshot_done(), now);
    case v1::NodeMessage::kProblem:
      return OnProblem(from, message.problem(), now);
    case v1::NodeMessage::kAccusation:
      return OnAccusation(from, message.accusation(), now);
    case v1::NodeMessage::kHostSumFailure:
      return OnHostSumFailure(from, message.host_sum_failure(), now);
    case v1::NodeMessage::kLeaving:
      left_.insert(node.session);
      Gone(from, "left in order", now);
      return Membership(now);
    case v1::NodeMessage::kRegister:
    case v1::NodeMessage::KIND_NOT_SET: {
      const SessionId session = node.session;
      actions_->CloseSession(session, absl::InvalidArgumentError(absl::StrCat(
                                          "node ", from.name, ": expected a message of protocol version ",
                                          kProtocolVersion, " other than Register on a registered session")));
      return OnSessionClosed(session, now);
    }
  }
}

// Whether this registration stands: closes the sessions of older lives of its name, or this one where it is an older
// life.
bool SchedulerCore::Supersede(SessionId session, const v1::Register& message, absl::Time now) {
  const NodeKey key = KeyOf(message.node());
  uint64_t& newest = newest_life_[key.name];
  if (key.incarnation < newest) {
    actions_->CloseSession(session, absl::AbortedError(absl::StrCat(
                                        "node ", key.name, ": life ", key.incarnation, " was superseded by life ",
                                        newest, " of the same name; give every process a --name of its own")));
    return false;
  }
  newest = key.incarnation;
  std::vector<NodeKey> older;
  for (auto at = nodes_.lower_bound({key.name, 0}); at != nodes_.end() && at->first < key; ++at) {
    older.push_back(at->first);
  }
  for (const NodeKey& old : older) {
    if (const SessionId was = nodes_.at(old).session; was != 0) {
      actions_->CloseSession(was, absl::AbortedError(absl::StrCat("node ", key.name, ": superseded by a newer life")));
    }
    Gone(old, "superseded by a newer life", now);
  }
  return true;
}

void SchedulerCore::OnRegister(SessionId session, const v1::Register& message, absl::Time now) {
  const NodeKey key = KeyOf(message.node());
  if (message.protocol_version() != kProtocolVersion) {
    return actions_->CloseSession(session, absl::FailedPreconditionError(absl::StrCat(
                                               "node ", key.name, " speaks protocol version ",
                                               message.protocol_version(), ", this scheduler speaks version ",
                                               kProtocolVersion, "; run the same release of Sluice on both")));
  }
  if (key.name.empty() || key.incarnation == 0 || (message.role() != v1::SERVER && message.role() != v1::WORKER)) {
    return actions_->CloseSession(session,
                                  absl::InvalidArgumentError("Register needs a node name, an incarnation and a role"));
  }
  if (!Supersede(session, message, now)) return;
  const bool server = message.role() == v1::SERVER;
  if (const auto known = nodes_.find(key); known != nodes_.end()) {
    const SessionId was = known->second.session;
    if (was != 0) {
      sessions_.erase(was);
      known->second.session = 0;
      actions_->CloseSession(was, absl::UnavailableError("another session of this node was opened"));
    }
    // A worker whose stream broke begins anew; a server still has what it had.
    if (!server) Gone(key, "its session broke", now);
  }
  KnownNode& node = nodes_[key];
  node.info = message;
  node.session = session;
  node.heard = now;
  node.order = ++registrations_;
  node.jobs.clear();
  for (const v1::JobGeneration& held : message.jobs()) node.jobs.insert(held.job_id());
  sessions_[session] = key;
  if (server) {
    for (auto& [sequence, job] : jobs_) {
      const bool back = job.lost.erase(key) > 0;
      if (!back || !job.transition) continue;
      job.fenced.insert(key);  // its shards survive after all, if it reports in time
      job.waiting.insert(key);
    }
  }

  v1::SchedulerMessage welcome;
  welcome.mutable_welcome()->set_lease_ms(static_cast<uint64_t>(absl::ToInt64Milliseconds(options_.lease)));
  actions_->Send(session, welcome);
  SendMissing(key);

  if (now >= settled_at_) unsettled_since_ = now;
  settled_at_ = std::min(now + options_.gather, unsettled_since_ + 5 * options_.gather);
  settling_ = true;
  if (!GraceOver(now)) {
    for (const auto& [sequence, job] : jobs_) {
      if (!job.started() || job.ended()) continue;
      for (const NodeKey& planned : PlanNodes(job.plan())) {
        const auto newest = newest_life_.find(planned.name);
        const bool superseded = newest != newest_life_.end() && newest->second > planned.incarnation;
        if (!Here(planned) && !superseded) return;  // wait for it
      }
    }
    return EndGrace(now);
  }
  Membership(now);
}

void SchedulerCore::SendMissing(const NodeKey& key) {
  KnownNode& node = nodes_.at(key);
  const std::set<std::string> held = node.jobs;
  for (const std::string& id : held) {
    const JobEntry* job = Active(id);
    if (job == nullptr || PlanNodes(job->plan()).count(key) == 0) SendEndJob(id, key);
  }
  std::map<std::string, uint64_t> generations;
  for (const v1::JobGeneration& job : node.info.jobs()) generations[job.job_id()] = job.generation();
  for (const auto& [sequence, job] : jobs_) {
    if (!job.started() || job.ended() || job.lost.count(key) > 0 || PlanNodes(job.plan()).count(key) == 0) continue;
    if (generations[job.id()] < job.plan().generation()) SendPlan(job, key);
    if (job.transition && job.waiting.count(key) > 0) SendFence(job, key);
    if (!job.transition && job.ordered_version > 0 && IsServer(node) && !CheckpointAt(job, job.ordered_version)) {
      v1::SchedulerMessage message;
      message.mutable_checkpoint()->set_job_id(job.id());
      message.mutable_checkpoint()->set_generation(job.plan().generation());
      message.mutable_checkpoint()->set_version(job.ordered_version);
      Send(key, message);
    }
  }
}

void SchedulerCore::OnSessionClosed(SessionId session, absl::Time now) {
  last_event_ = now;
  left_.erase(session);
  const auto known = sessions_.find(session);
  if (known == sessions_.end()) return;
  const NodeKey key = known->second;
  KnownNode& node = nodes_.at(key);
  sessions_.erase(known);
  node.session = 0;
  if (IsServer(node)) return;  // it may still be there: nothing is decided before its lease has run out
  Gone(key, "its session ended", now);
  Membership(now);
}

void SchedulerCore::Gone(const NodeKey& key, const std::string& why, absl::Time now) {
  const auto known = nodes_.find(key);
  if (known == nodes_.end()) return;
  if (known->second.session != 0) sessions_.erase(known->second.session);
  nodes_.erase(known);
  for (auto& [sequence, job] : jobs_) {
    if (!job.started() || job.ended() || PlanNodes(job.plan()).count(key) == 0) continue;
    if (!job.lost.insert(key).second) continue;
    if (job.trouble.insert(key.name).second) AddEvent(job, now, absl::StrCat(key.name, " is gone: ", why));
    job.trouble_since = std::min(job.trouble_since, now);
    if (job.transition && job.fenced.count(key) > 0) job.transition = false;  // it was counted on: another one is owed
  }
}

// -------------------------------------------------------------------------------------------------------- timers
void SchedulerCore::Membership(absl::Time now) {
  if (consider_at_ != absl::InfiniteFuture()) return;
  if (now - last_membership_ < options_.gather) {
    consider_at_ = last_membership_ + options_.gather;
  } else {
    last_membership_ = now;
    ConsiderAll(now);
  }
}

void SchedulerCore::ConsiderAll(absl::Time now) {
  if (!GraceOver(now)) return;
  for (const bool started : {true, false}) {  // jobs under way have the first claim on idle workers
    for (auto& [sequence, job] : jobs_) {
      if (!job.ended() && job.started() == started) Consider(job, now);
    }
  }
}

void SchedulerCore::OnTimer(absl::Time now) {
  // Silence of all for longer than a lease means that this process itself did not run: its ears, not the nodes.
  const bool slept = now - last_event_ > options_.lease * 1.5;
  last_event_ = now;
  if (slept) {
    for (auto& [key, node] : nodes_) node.heard = std::max(node.heard, now - options_.lease / 2);
  }
  std::vector<NodeKey> expired;
  for (const auto& [key, node] : nodes_) {
    if (now >= node.heard + options_.lease) expired.push_back(key);
  }
  for (const NodeKey& key : expired) {
    const auto known = nodes_.find(key);
    if (known == nodes_.end()) continue;
    const std::string why = absl::StrCat("nothing heard of it for ", absl::FormatDuration(options_.lease));
    if (known->second.session != 0) {
      actions_->CloseSession(known->second.session,
                             absl::DeadlineExceededError(absl::StrCat("node ", key.name, ": ", why)));
    }
    Gone(key, why, now);
  }
  if (!expired.empty()) Membership(now);
  if (!GraceOver(now) && now >= grace_until_) EndGrace(now);
  const bool gathered = now >= consider_at_, settled = settling_ && now >= settled_at_;
  if (gathered) {
    consider_at_ = absl::InfiniteFuture();
    last_membership_ = now;
  }
  if (settled) settling_ = false;
  if (gathered || settled) ConsiderAll(now);
}

absl::Time SchedulerCore::NextDeadline() const {
  absl::Time next = consider_at_;
  for (const auto& [key, node] : nodes_) next = std::min(next, node.heard + options_.lease);
  if (grace_until_ != absl::InfinitePast()) next = std::min(next, grace_until_);
  if (settling_) next = std::min(next, settled_at_);
  return next;
}

// -------------------------------------------------------------------------------------------------------- sending
void SchedulerCore::Send(const NodeKey& key, const v1::SchedulerMessage& message) {
  const auto known = nodes_.find(key);
  if (known != nodes_.end() && known->second.session != 0) actions_->Send(known->second.session, message);
}

void SchedulerCore::SendPlan(const JobEntry& job, const NodeKey& key) {
  const auto known = nodes_.find(key);
  if (known == nodes_.end()) return;
  if (!IsServer(known->second)) {  // one job at a time
    const std::set<std::string> held = known->second.jobs;
    for (const std::string& other : held) {
      if (other != job.id()) SendEndJob(other, key);
    }
  }
  known->second.jobs.insert(job.id());
  v1::SchedulerMessage message;
  *message.mutable_plan() = job.plan();
  Send(key, message);
}

void SchedulerCore::SendEndJob(const std::string& job_id, const NodeKey& key) {
  if (const auto known = nodes_.find(key); known != nodes_.end()) known->second.jobs.erase(job_id);
  v1::SchedulerMessage message;
  message.mutable_end_job()->set_job_id(job_id);
  Send(key, message);
}

void SchedulerCore::SendFence(const JobEntry& job, const NodeKey& key) {
  v1::SchedulerMessage message;
  message.mutable_fence()->set_job_id(job.id());
  message.mutable_fence()->set_generation(job.row.generation());
  Send(key, message);
}

v1::GetClusterResponse SchedulerCore::Cluster() const {
  v1::GetClusterResponse response;
  for (const auto& [key, node] : nodes_) {
    v1::NodeStatus* status = response.add_nodes();
    status->set_role(node.info.role());
    *status->mutable_node() = node.info.node();
    status->set_address(node.info.address());
    status->set_host_id(node.info.host_id());
    status->set_numeric_profile(node.info.numeric_profile());
    status->set_memory_limit(node.info.memory_limit());
    if (!IsServer(node)) {
      for (const auto& [sequence, job] : jobs_) {
        if (job.started() && !job.ended() && job.lost.count(key) == 0 && PlanNodes(job.plan()).count(key) > 0) {
          status->set_job_id(job.id());
        }
      }
    }
    if (node.session == 0) {
      response.add_warnings(absl::StrCat(key.name, ": its session broke; it is given up when its lease runs out"));
    }
  }
  return response;
}

}  // namespace sluice
