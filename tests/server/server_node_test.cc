// A ServerNode as its workers and the scheduler meet it: plans late and early, frames outside the plan, garbage.
#include "server/server_node.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <mutex>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "common/job_spec.h"
#include "common/optimizer.h"
#include "common/philox.h"
#include "common/safetensors.h"
#include "common/version.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/node_rig.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<float> InitialValues(const Layout& layout) {
  std::vector<float> values(layout.space().size());
  for (const Tensor& t : layout.space().tensors()) {
    FillInitial(t, layout.plan().spec().train().seed(), 0, t.elements, values.data() + t.offset);
  }
  return values;
}

TEST(ServerNodeTest, HelloWaitsForThePlanAndThenGetsInitialValues) {
  NodeRig rig({.servers = 2});
  const auto layout = ServerTestPlan{}.Make();
  WorkersEnd workers(&rig, layout, 1);  // hello and subscribe are there first
  EXPECT_FALSE(workers.stream(0, 0).closed());
  rig.SendPlan(layout);
  EXPECT_EQ(workers.Values(0), InitialValues(*layout));
}

TEST(ServerNodeTest, ARoundIsTheUpdateOfTheMean) {
  NodeRig rig({.servers = 2});
  const auto layout = ServerTestPlan{}.Make();
  rig.SendPlan(layout);
  WorkersEnd workers(&rig, layout, 1);
  ASSERT_TRUE(workers.Train(0, 1));
  const std::vector<float> before = workers.Values(0), after = workers.Values(1);
  const double count = WorkersEnd::Count(0, 0) + WorkersEnd::Count(0, 1);
  std::vector<float> want(before.size()), sum(before.size()), momentum(before.size());
  for (size_t i = 0; i < sum.size(); ++i) sum[i] = WorkersEnd::Gradient(0, 0, i) + WorkersEnd::Gradient(0, 1, i);
  ApplyUpdate(MakeUpdateRule(layout->plan().spec().optimizer(), 0, layout->rounds()), true,
              static_cast<float>(1 / count), sum.data(), before.data(), want.data(), momentum.data(), nullptr,
              sum.size());
  EXPECT_EQ(after, want);
  v1::RoundRecord record;
  ASSERT_TRUE(rig.Await([&](const std::vector<v1::NodeMessage>& all) {
    for (const v1::NodeMessage& m : all) {
      if (m.has_round_record()) record = m.round_record();
    }
    return record.count() > 0;
  }));
  EXPECT_EQ(record.count(), count);
  EXPECT_EQ(record.loss(), 0.5);
  EXPECT_GT(record.gradient_norm(), 0);
  EXPECT_FALSE(record.skipped());
  // Every payload byte was acknowledged on the stream it came by.
  for (uint32_t c = 0; c < 2; ++c) {
    EXPECT_TRUE(workers.stream(c, 0).AwaitAck(6 * sizeof(float)));  // chunks 0, 2, 3
    EXPECT_TRUE(workers.stream(c, 1).AwaitAck(2 * sizeof(float)));
  }
}

// One stream to a server under a two-worker plan; a second worker's stream stays beside it.
class HostileTest : public ::testing::Test {
 protected:
  HostileTest() : rig_({.servers = 2}), layout_(ServerTestPlan{}.Make()) {
    rig_.SendPlan(layout_);
    workers_ = std::make_unique<WorkersEnd>(&rig_, layout_, 3);
    EXPECT_TRUE(workers_->Train(0, 0));
  }
  // What `end` was told must be `code`; the workers' streams know nothing of it.
  void ExpectRefused(StreamEnd& end, absl::StatusCode code, const std::string& text) {
    const absl::Status status = end.AwaitClosed();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    ASSERT_TRUE(end.refusal().has_value());
    EXPECT_EQ(end.refusal()->code(), static_cast<int>(code));
    EXPECT_EQ(end.refusal()->message(), status.message());
  }
  // The round still counts each contributor once and the same bits come out.
  void TearDown() override {
    EXPECT_TRUE(workers_->Train(0, 2));
    NodeRig quiet({.servers = 2});
    quiet.SendPlan(layout_);
    WorkersEnd undisturbed(&quiet, layout_, 3);
    EXPECT_TRUE(undisturbed.Train(0, 2));
    EXPECT_EQ(workers_->Values(2), undisturbed.Values(2));
  }

  NodeRig rig_;
  const std::shared_ptr<const Layout> layout_;
  std::unique_ptr<WorkersEnd> workers_;
};

TEST_F(HostileTest, PushesOutsideThePlan) {
  // server-0 holds shards 0 and 2: chunks 0, 2, 3; server-1 chunk 1. Chunks of 2 elements.
  struct Case {
    std::function<void(v1::ChunkHeader*)> change;
    size_t values;
    absl::StatusCode code;
    std::string text;
  };
  using C = absl::StatusCode;
  const std::vector<Case> cases = {
      {[](auto* h) { h->set_chunk(4); }, 2, C::kOutOfRange, "chunk 4 of 4"},
      {[](auto* h) { h->set_chunk(UINT64_MAX); }, 2, C::kOutOfRange, "of 4"},
      {[](auto* h) { h->set_chunk(1); }, 2, C::kInvalidArgument, "belongs to another server"},
      {[](auto* h) { h->set_elements(1); }, 1, C::kInvalidArgument, "1 elements; it has 2"},
      {[](auto* h) { h->set_elements(3); }, 3, C::kInvalidArgument, "3 elements; it has 2"},
      {[](auto* h) { h->set_elements(UINT64_MAX); }, 2, C::kInvalidArgument, "payload bytes left"},
      {[](auto* h) { h->set_elements(UINT64_MAX / 4 + 2); }, 2, C::kInvalidArgument, "payload bytes left"},
      {[](auto* h) {}, 1, C::kInvalidArgument, "payload bytes left"},
      {[](auto* h) {}, 3, C::kInvalidArgument, "12 payload bytes, headers name 8"},
      {[](auto* h) { h->set_encoding(static_cast<v1::Encoding>(7)); }, 2, C::kInvalidArgument, "encoding 7"},
      {[](auto* h) { h->set_encoding(v1::BF16); }, 1, C::kInvalidArgument, "pushed in BF16; this job pushes F32"},
      {[](auto* h) { h->set_encoding(v1::BF16); }, 2, C::kInvalidArgument, "8 payload bytes, headers name 4"},
      {[](auto* h) { h->set_encoding(v1::TOP_K); }, 2, C::kInvalidArgument, "values of 2"},
      {[](auto* h) { h->set_encoding(v1::TOP_K), h->set_elements(UINT64_MAX); }, 2, C::kInvalidArgument,
       "payload bytes left"},
      {[](auto* h) { h->set_generation(2); }, 2, C::kInvalidArgument, "generation 2"},
      {[](auto* h) { h->set_contributor(1); }, 2, C::kInvalidArgument, "on the stream of contributor 0"},
      {[](auto* h) { h->set_contributor(2); }, 2, C::kOutOfRange, "contributor 2 of 2"},
      {[](auto* h) { h->set_space(1); }, 2, C::kInvalidArgument, "space 1"},
      {[](auto* h) { h->set_round(1); }, 2, C::kFailedPrecondition, "round 0 is open"},
      {[](auto* h) { h->set_round(5); }, 2, C::kOutOfRange, "has 5 rounds"},
      {[](auto* h) { h->set_count(-1); }, 2, C::kInvalidArgument, "count -1"},
      {[](auto* h) { h->set_count(std::nan("")); }, 2, C::kInvalidArgument, "count nan"},
  };
  for (const Case& c : cases) {
    auto end = rig_.Open(0, NodeRigHello(*layout_, 0));
    v1::ChunkFrame frame;
    *frame.add_header() = NodeRigHeader(*layout_, 0, 0, 0, 1);
    c.change(frame.mutable_header(0));
    end->Write(frame, {std::vector<float>(c.values, 1e30f)});
    SCOPED_TRACE(c.text);
    ExpectRefused(*end, c.code, c.text);
    EXPECT_EQ(end->refusal()->generation(), 1u);
  }
}

TEST_F(HostileTest, NothingOfAFrameWhoseLengthsDoNotAddUpIsCounted) {
  auto end = rig_.Open(0, NodeRigHello(*layout_, 0));
  v1::ChunkFrame frame;
  for (const uint64_t chunk : {0, 2, 3}) *frame.add_header() = NodeRigHeader(*layout_, 0, 0, chunk, 1);
  end->Write(frame, {std::vector<float>(5, 1e30f)});
  ExpectRefused(*end, absl::StatusCode::kInvalidArgument, "payload bytes left");
}

TEST_F(HostileTest, ReportsAndSubscriptionsOutsideThePlan) {
  using C = absl::StatusCode;
  const auto refused = [&](uint32_t server, const std::function<void(v1::RoundReport*)>& change, C code,
                           const std::string& text) {
    auto end = rig_.Open(server, NodeRigHello(*layout_, 0));
    v1::ChunkFrame frame;
    frame.mutable_report()->set_generation(1);
    change(frame.mutable_report());
    end->Write(frame);
    ExpectRefused(*end, code, text);
  };
  refused(
      1, [](auto*) {}, C::kFailedPrecondition, "reports go to the verdict holder, server-0");
  refused(
      0, [](auto* r) { r->set_contributor(1); }, C::kInvalidArgument, "on the stream of 0");
  refused(
      0, [](auto* r) { r->set_round(1); }, C::kFailedPrecondition, "round 0 is open");
  refused(
      0, [](auto* r) { r->set_round(5); }, C::kOutOfRange, "5 rounds");
  refused(
      0, [](auto* r) { r->set_generation(9); }, C::kInvalidArgument, "generation 9");
  for (const auto& [first, chunks] : {std::pair<uint64_t, uint64_t>{0, 5}, {4, 0}, {1, UINT64_MAX}}) {
    auto end = rig_.Open(0, NodeRigHello(*layout_, 0));
    v1::ChunkFrame frame = NodeRigSubscribe(*layout_, 0);
    frame.mutable_subscribe()->mutable_wants(0)->set_first_chunk(first);
    frame.mutable_subscribe()->mutable_wants(0)->set_chunks(chunks);
    end->Write(frame);
    ExpectRefused(*end, C::kOutOfRange, "of 4");
  }
}

TEST_F(HostileTest, Hellos) {
  using C = absl::StatusCode;
  const auto refused = [&](const std::function<void(v1::StreamHello*)>& change, C code, const std::string& text) {
    v1::StreamHello hello = NodeRigHello(*layout_, 0);
    change(&hello);
    auto end = rig_.Open(0, hello);
    ExpectRefused(*end, code, text);
  };
  refused([](auto* h) { h->set_protocol_version(kProtocolVersion + 1); }, C::kFailedPrecondition, "protocol version");
  refused([](auto* h) { h->set_contributor(2); }, C::kOutOfRange, "contributor 2 of 2");
  refused([](auto* h) { h->set_contributor(1); }, C::kPermissionDenied, "belongs to worker-1");
  refused([](auto* h) { h->mutable_node()->set_incarnation(2); }, C::kPermissionDenied, "life 2");
  refused([](auto* h) { h->set_generation(0); }, C::kInvalidArgument, "generation 0");
}

TEST_F(HostileTest, Garbage) {
  std::mt19937 random(11);
  for (int run = 0; run < 200; ++run) {
    // Before and after a good hello; every third one a good frame with one byte changed.
    auto end = run % 2 ? rig_.Open(0) : rig_.Open(0, NodeRigHello(*layout_, 0));
    std::string bytes;
    if (run % 3 == 0) {
      v1::ChunkFrame frame;
      *frame.add_header() = NodeRigHeader(*layout_, 3, 0, 0, 1);  // not open: never counted
      frame.set_payload(std::string(8, 'x'));
      bytes = frame.SerializeAsString();
      // A header field's tag, never its value: what comes out is not a legal contribution to round 0.
      bytes[2] = static_cast<char>(random() | 0x80);
    } else {
      bytes.resize(1 + random() % 300);
      for (char& b : bytes) b = static_cast<char>(random());
    }
    end->WriteBytes(bytes);
    end->stream->Close(absl::OkStatus());
    EXPECT_FALSE(absl::IsDeadlineExceeded(end->AwaitClosed()));
  }
  auto end = rig_.Open(0);
  end->WriteBytes("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff");
  ExpectRefused(*end, absl::StatusCode::kInvalidArgument, "");
  end = rig_.Open(0);
  end->WriteBytes("");
  ExpectRefused(*end, absl::StatusCode::kInvalidArgument, "must carry hello");
}

TEST(ServerNodeTest, FramesThatDoNotAskAreAcknowledgedWithTheNextOneThatDoes) {
  NodeRig rig({.servers = 1});
  ServerTestPlan plan;
  plan.servers = 1;
  const auto layout = plan.Make();
  rig.SendPlan(layout);
  const auto stream = rig.Open(0, NodeRigHello(*layout, 0));
  stream->Write(NodeRigSubscribe(*layout, 0));
  uint64_t bytes = 0, asked = 0;
  for (uint64_t chunk = 0; chunk < layout->table().chunks(); ++chunk) {
    ASSERT_TRUE(stream->AwaitValue(chunk, 0));
    const bool last = chunk + 1 == layout->table().chunks();
    v1::ChunkFrame push;
    *push.add_header() = NodeRigHeader(*layout, 0, 0, chunk, 1);
    push.set_ack_later(!last && chunk % 2 == 0);
    stream->Write(push, {std::vector<float>(layout->table().range(chunk).size(), 1)});
    bytes += layout->table().range(chunk).size() * sizeof(float);
    asked += !push.ack_later();
  }
  EXPECT_TRUE(stream->AwaitAck(bytes));
  EXPECT_EQ(stream->acks().size(), asked);
}

TEST(ServerNodeTest, ANewGenerationClosesTheOldStreamsAndServesBothKeptVersions) {
  NodeRig rig({.servers = 2});
  ServerTestPlan plan;
  rig.SendPlan(plan.Make());
  WorkersEnd first(&rig, plan.Make(), 1);
  ASSERT_TRUE(first.Train(0, 2));
  // Round 2 stays open for want of one contribution.
  first.Push(2, [](uint32_t contributor, uint64_t chunk) { return contributor != 1 || chunk != 1; });
  rig.SendFence(plan.job, 2);
  std::vector<v1::FenceReport> reports;
  ASSERT_TRUE(rig.Await([&](const std::vector<v1::NodeMessage>& all) {
    reports.clear();
    for (const v1::NodeMessage& m : all) {
      if (m.has_fence_report()) reports.push_back(m.fence_report());
    }
    return reports.size() == 2;
  }));
  for (const v1::FenceReport& r : reports) {
    EXPECT_EQ(r.generation(), 2u);
    EXPECT_EQ(r.plan_generation(), 1u);
    for (const v1::ShardReport& s : r.shards()) EXPECT_EQ(s.min_version(), 2u);
  }
  plan.generation = 2;
  plan.start = 1;  // the version before the open one is still there
  rig.SendPlan(plan.Make());
  for (uint32_t c = 0; c < 2; ++c) {
    const absl::Status status = first.stream(c, 0).AwaitClosed();
    EXPECT_TRUE(absl::IsAborted(status)) << status;
    EXPECT_EQ(first.stream(c, 0).refusal()->generation(), 2u);
  }
  auto late = rig.Open(0, NodeRigHello(*ServerTestPlan{}.Make(), 0));
  EXPECT_TRUE(absl::IsAborted(late->AwaitClosed()));
  EXPECT_EQ(late->refusal()->generation(), 2u);

  WorkersEnd second(&rig, plan.Make(), 2);
  EXPECT_EQ(second.Values(1), first.Values(1));
  EXPECT_EQ(second.Values(2), first.Values(2));
  EXPECT_THAT(second.stream(0, 0).versions(0), ElementsAre(1, 2));
  second.Push(1, [](uint32_t, uint64_t) { return true; });  // committed: dropped
  ASSERT_TRUE(second.Train(2, 5));

  NodeRig quiet({.servers = 1});
  ServerTestPlan undisturbed;
  undisturbed.servers = 1;
  quiet.SendPlan(undisturbed.Make());
  WorkersEnd third(&quiet, undisturbed.Make(), 3);
  ASSERT_TRUE(third.Train(0, 5));
  EXPECT_EQ(second.Values(5), third.Values(5));
}

TEST(ServerNodeTest, NormsAndVerdictsSurviveBrokenLinks) {
  NodeRig rig({.servers = 3, .delay_seed = 5, .max_delay = absl::Milliseconds(1)});
  ServerTestPlan plan;
  plan.servers = 3;
  plan.rounds = 12;
  rig.SendPlan(plan.Make());
  WorkersEnd workers(&rig, plan.Make(), 1);
  for (uint64_t round = 0; round < plan.rounds; ++round) {
    rig.network().Break("server-1", "server-0");
    ASSERT_TRUE(workers.Train(round, round));
    workers.Push(round, [](uint32_t, uint64_t) { return true; });
    rig.network().Break("server-2", "server-0");
  }
  EXPECT_TRUE(workers.Train(plan.rounds, plan.rounds));
}

TEST(ServerNodeTest, ANewSessionHearsWhatTheLastOneMayHaveMissed) {
  NodeRig rig({.servers = 2});
  ServerTestPlan plan;
  plan.rounds = 2;
  rig.SendPlan(plan.Make());
  WorkersEnd workers(&rig, plan.Make(), 1);
  ASSERT_TRUE(workers.Train(0, 2));
  const auto progress = [](const std::vector<v1::NodeMessage>& all) {
    std::map<uint32_t, int> by_shard;
    for (const v1::NodeMessage& m : all) {
      if (m.has_shard_progress() && m.shard_progress().version() == 2) ++by_shard[m.shard_progress().shard()];
    }
    return by_shard;
  };
  ASSERT_TRUE(rig.Await([&](const auto& all) { return progress(all).size() == 3; }));
  rig.BreakSessions();
  EXPECT_TRUE(rig.Await([&](const auto& all) {
    const std::map<uint32_t, int> p = progress(all);
    return p.at(0) >= 2 && p.at(1) >= 2 && p.at(2) >= 2;
  }));
  bool named = false;
  for (const v1::NodeMessage& m : rig.messages()) {
    for (const v1::JobGeneration& g : m.register_().jobs()) named |= g.job_id() == plan.job && g.generation() == 1;
  }
  EXPECT_TRUE(named);
}

TEST(ServerNodeTest, SeveralJobsAtOnceAndTheEndOfOne) {
  NodeRig rig({.servers = 2, .lanes = 2});
  ServerTestPlan a, b;
  b.job = "job-2";
  b.stream = true;
  b.hidden = 9;
  rig.SendPlan(a.Make());
  rig.SendPlan(b.Make());
  WorkersEnd wa(&rig, a.Make(), 1), wb(&rig, b.Make(), 2);
  ASSERT_TRUE(wa.Train(0, 3));
  ASSERT_TRUE(wb.Train(0, 1));
  rig.SendEnd(a.job);
  EXPECT_TRUE(wa.stream(0, 0).AwaitClosed().ok());
  EXPECT_TRUE(wa.stream(1, 1).AwaitClosed().ok());
  EXPECT_TRUE(wb.Train(1, 5));
  EXPECT_EQ(rig.node(0).FindJob(a.job), nullptr);
  EXPECT_GT(rig.node(0).FindJob(b.job)->mapped_bytes(), 0u);
}

TEST(ServerNodeTest, AJobThatDoesNotFitIsRefusedWithTheArithmetic) {
  // 8 elements x (value, previous, momentum, sum) x 4 bytes = 128.
  NodeRig rig({.servers = 1, .memory_limit = 200});
  ServerTestPlan a, b;
  a.servers = b.servers = 1;
  b.job = "job-2";
  rig.SendPlan(a.Make());
  rig.SendPlan(b.Make());
  const v1::NodeProblem problem = rig.AwaitProblem();
  EXPECT_EQ(problem.job_id(), b.job);
  EXPECT_EQ(problem.code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_THAT(problem.message(),
              HasSubstr("8 elements x 16 bytes = 128 bytes here, other jobs hold 128, the limit is 200"));
  WorkersEnd workers(&rig, a.Make(), 1);
  EXPECT_TRUE(workers.Train(0, 1));
}

TEST(ServerNodeTest, JobsThatOnlyHellosSpeakOfStayFew) {
  NodeRig rig({.servers = 1});
  const auto layout = ServerTestPlan{.servers = 1}.Make();
  std::vector<std::shared_ptr<StreamEnd>> open;
  auto closed = std::make_shared<absl::Notification>();
  auto first = std::make_shared<std::once_flag>();  // the rest close with the rig
  for (int i = 0; i < 65; ++i) {                    // whichever comes last
    v1::ChunkFrame frame;
    *frame.mutable_hello() = NodeRigHello(*layout, 0);
    frame.mutable_hello()->set_job_id("nobody-" + std::to_string(i));
    open.push_back(rig.Open(0, [closed, first] { std::call_once(*first, [&] { closed->Notify(); }); }));
    open.back()->Write(frame);
  }
  ASSERT_TRUE(closed->WaitForNotificationWithTimeout(kNodeRigPatience));
  int refused = 0;
  for (const auto& end : open) {
    if (!end->closed()) continue;
    EXPECT_TRUE(absl::IsResourceExhausted(end->AwaitClosed()));
    ++refused;
  }
  EXPECT_EQ(refused, 1);
  // The scheduler's word counts all the same.
  rig.SendPlan(layout);
  v1::SchedulerMessage order;  // its answer says that the plan is there
  order.mutable_checkpoint()->set_job_id(layout->plan().job_id());
  order.mutable_checkpoint()->set_generation(1);
  rig.Send(order);
  ASSERT_TRUE(rig.Await([](const std::vector<v1::NodeMessage>& all) { return all.back().has_snapshot_done(); }));
  WorkersEnd workers(&rig, layout, 1);
  EXPECT_TRUE(workers.Train(0, 1));
}

// With error feedback the last version's checkpoint waits for the residuals of a contributor that says it keeps one,
// and holds zeros for one that does not.
TEST(ServerNodeTest, CheckpointsWaitForResidualsThatWereAnnounced) {
  const TemporaryFolder folder;
  for (const bool keeps : {false, true}) {
    NodeRig rig({.servers = 1, .checkpoint_root = folder / (keeps ? "keeps" : "none")});
    v1::Plan plan = ServerTestPlan{.replicas = 1, .servers = 1, .shards = 1, .rounds = 1}.Proto();
    plan.mutable_spec()->mutable_transfer()->mutable_push()->mutable_bf16();
    FillDefaults(plan.mutable_spec());
    plan.set_hash(PlanHash(plan));
    const auto layout = *Layout::Make(plan);
    rig.SendPlan(layout);
    v1::StreamHello hello = NodeRigHello(*layout, 0);
    hello.set_residuals(keeps);
    const auto worker = rig.Open(0, hello);
    worker->Write(NodeRigSubscribe(*layout, 0));
    const uint64_t chunks = layout->table().chunks();
    v1::ChunkFrame push;
    push.mutable_report()->set_generation(1);
    push.mutable_report()->set_count(4);
    std::vector<std::vector<float>> payload;
    for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
      v1::ChunkHeader& header = *push.add_header() = NodeRigHeader(*layout, 0, 0, chunk, 4);
      header.set_encoding(v1::BF16);
      payload.push_back({std::bit_cast<float>(0x3f803f80u)});  // two ones
    }
    worker->Write(push, payload);
    for (uint64_t chunk = 0; chunk < chunks; ++chunk) ASSERT_TRUE(worker->AwaitValue(chunk, 1));
    uint64_t taken = chunks * 4;
    const auto residual = [&](uint64_t chunk, uint64_t round, std::vector<float> values) {
      v1::ChunkFrame frame;
      v1::ChunkHeader& header = *frame.add_header();
      header.set_chunk(chunk);
      header.set_generation(1);
      header.set_round(round);
      header.set_residual(true);
      header.set_elements(values.size());
      taken += values.size() * sizeof(float);
      std::vector<std::vector<float>> bytes;
      if (!values.empty()) bytes.push_back(std::move(values));
      worker->Write(frame, bytes);
    };
    const auto done = [](const std::vector<v1::NodeMessage>& all) {
      return std::find_if(all.begin(), all.end(), [](const v1::NodeMessage& m) { return m.has_snapshot_done(); });
    };
    if (keeps) {
      residual(0, 7, {9, 9});  // of no checkpoint: taken and dropped
      for (uint64_t chunk = 0; chunk + 1 < chunks; ++chunk) residual(chunk, 1, {1.0f + static_cast<float>(chunk), -2});
      residual(0, 1, {9, 9});  // said again
      ASSERT_TRUE(worker->AwaitAck(taken));
      const auto messages = rig.messages();
      EXPECT_TRUE(done(messages) == messages.end()) << "one is still to come";
      residual(chunks - 1, 1, {});  // zeros
    }
    ASSERT_TRUE(rig.Await([&](const auto& all) { return done(all) != all.end(); }));
    const auto messages = rig.messages();
    const v1::SnapshotDone& snapshot = done(messages)->snapshot_done();
    EXPECT_EQ(snapshot.error(), "");
    const auto file = SafetensorsFile::Open(absl::StrCat(folder / (keeps ? "keeps" : "none"), "/", plan.job_id(),
                                                         "/staging-t1-v1/", snapshot.file().name()));
    ASSERT_TRUE(file.ok()) << file.status();
    uint64_t found = 0;
    for (const SafetensorsTensor& tensor : (*file)->tensors()) {
      if (!absl::StartsWith(tensor.name, "residual-0.")) continue;
      const uint64_t chunk = std::stoul(tensor.name.substr(std::string("residual-0.").size())) / 2;
      std::vector<float> values(2), expected(2);
      if (keeps && chunk + 1 < chunks) expected = {1.0f + static_cast<float>(chunk), -2};
      ASSERT_TRUE((*file)->ReadFloats(tensor, 0, absl::MakeSpan(values)).ok());
      EXPECT_EQ(values, expected) << tensor.name;
      ++found;
    }
    EXPECT_EQ(found, chunks);
    // What cannot be one ends the stream.
    residual(0, 1, {1});
    EXPECT_TRUE(absl::IsInvalidArgument(worker->AwaitClosed()));
  }
}

TEST(ServerNodeTest, GetPlanNamesWhatAStockStubNeeds) {
  NodeRig rig({.servers = 2});
  const auto layout = ServerTestPlan{.hidden = 4}.Make();
  v1::GetPlanRequest request;
  request.set_job_id(layout->plan().job_id());
  EXPECT_TRUE(absl::IsNotFound(rig.node(0).GetPlan(request).status()));
  rig.SendPlan(layout);
  WorkersEnd workers(&rig, layout, 1);
  ASSERT_TRUE(workers.Train(0, 0));
  const absl::StatusOr<v1::GetPlanResponse> response = rig.node(1).GetPlan(request);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->plan().hash(), layout->plan().hash());
  ASSERT_EQ(response->tensors_size(), static_cast<int>(layout->space().tensors().size()));
  for (int i = 0; i < response->tensors_size(); ++i) {
    const Tensor& t = layout->space().tensors()[static_cast<size_t>(i)];
    EXPECT_EQ(response->tensors(i).name(), t.name);
    EXPECT_EQ(response->tensors(i).offset(), t.offset);
  }
  ASSERT_EQ(response->chunks_size(), static_cast<int>(layout->table().chunks()));
  uint64_t next = 0;
  for (int c = 0; c < response->chunks_size(); ++c) {
    EXPECT_EQ(response->chunks(c).offset(), next);
    next += response->chunks(c).elements();
    EXPECT_EQ(response->chunks(c).address(), "server-" + std::to_string(c % 3 % 2));
  }
  EXPECT_EQ(next, layout->space().size());
}

}  // namespace
}  // namespace sluice
