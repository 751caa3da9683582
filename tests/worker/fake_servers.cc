#include "tests/worker/fake_servers.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/log.h"

namespace sluice {

class FakeServers::Handler : public StreamHandler {
 public:
  Handler(FakeServers* owner, std::shared_ptr<Client> client) : owner_(owner), client_(std::move(client)) {}
  void OnMessage(grpc::ByteBuffer message) override {
    absl::StatusOr<ParsedFrame> frame = ParseFrame(std::move(message));
    CHECK(frame.ok());
    owner_->OnFrame(client_, *frame);
  }
  void OnClosed(const absl::Status&) override {
    absl::MutexLock lock(&owner_->mutex_);
    std::erase(owner_->clients_, client_);
    client_->stream = nullptr;
  }

 private:
  FakeServers* const owner_;
  const std::shared_ptr<Client> client_;
};

FakeServers::FakeServers(InProcessNetwork* network, std::shared_ptr<const Layout> layout) : layout_(std::move(layout)) {
  std::set<std::string> addresses;
  {
    absl::MutexLock lock(&mutex_);
    chunks_.resize(layout_->table().chunks());
    for (uint32_t shard = 0; shard < layout_->plan().shards(); ++shard)
      addresses.insert(layout_->primary(shard).address());
  }
  for (const std::string& address : addresses) {
    const Acceptor acceptor = [this, address](std::shared_ptr<ByteStream> stream,
                                              const std::string&) -> std::shared_ptr<StreamHandler> {
      auto client = std::make_shared<Client>();
      client->stream = std::move(stream);
      client->server = address;
      absl::MutexLock lock(&mutex_);
      clients_.push_back(client);
      return std::make_shared<Handler>(this, client);
    };
    listeners_.push_back(*network->Listen(address, {{Plane::kParameter, acceptor}}));
  }
}

uint64_t FakeServers::Fence() {
  absl::MutexLock lock(&mutex_);
  fenced_ = true;
  return Lowest();
}

void FakeServers::SetLayout(std::shared_ptr<const Layout> layout) {
  std::vector<std::shared_ptr<ByteStream>> old;
  {
    absl::MutexLock lock(&mutex_);
    fenced_ = false;
    layout_ = std::move(layout);
    for (Chunk& chunk : chunks_) chunk.contributors.clear();
    for (const auto& client : clients_) old.push_back(client->stream);
  }
  for (const auto& stream : old) stream->Close(absl::AbortedError("an older generation"));
}

uint64_t FakeServers::MinVersion() {
  absl::MutexLock lock(&mutex_);
  return Lowest();
}

uint64_t FakeServers::Lowest() const {
  uint64_t version = UINT64_MAX;
  for (const Chunk& chunk : chunks_) version = std::min(version, chunk.version);
  return version;
}

bool FakeServers::At(uint64_t version) {
  return std::all_of(chunks_.begin(), chunks_.end(),
                     [version](const Chunk& chunk) { return chunk.version >= version; });
}

bool FakeServers::AwaitVersion(uint64_t version, absl::Duration patience) {
  absl::MutexLock lock(&mutex_);
  const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return At(version); };
  return mutex_.AwaitWithTimeout(absl::Condition(&ready), patience);
}

bool FakeServers::AwaitReports(v1::RoundReport::Kind kind, uint64_t round, absl::Duration patience, double* loss,
                               double* count) {
  absl::MutexLock lock(&mutex_);
  const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return reports_[{kind, round}].size() == layout_->ranks();
  };
  if (!mutex_.AwaitWithTimeout(absl::Condition(&ready), patience)) return false;
  *loss = *count = 0;
  for (const auto& [who, report] : reports_[{kind, round}]) {
    *loss += report.loss_sum();
    *count += report.count();
  }
  return true;
}

std::string FakeServers::wrong() {
  absl::MutexLock lock(&mutex_);
  return wrong_;
}

uint64_t FakeServers::empty_contributions() {
  absl::MutexLock lock(&mutex_);
  return empty_;
}

void FakeServers::OnFrame(const std::shared_ptr<Client>& client, const ParsedFrame& frame) {
  absl::MutexLock lock(&mutex_);
  if (client->stream == nullptr) return;
  if (frame.control.has_hello()) client->hello = frame.control.hello();
  if (fenced_ || client->hello.generation() != layout_->generation()) {
    if (client->hello.generation() > layout_->generation()) wrong_ = "a generation that nobody knows";
    return;
  }
  if (frame.control.has_subscribe()) {
    for (const v1::Want& want : frame.control.subscribe().wants()) {
      for (uint64_t c = want.first_chunk(); c < want.first_chunk() + want.chunks(); ++c) {
        if (layout_->tail(layout_->table().shard(c)).address() == client->server) client->wants[c] = want.version();
      }
    }
    Serve(*client);
  }
  if (frame.control.has_report()) {
    const v1::RoundReport& report = frame.control.report();
    if (client->server != layout_->primary(0).address()) wrong_ = "a report that is not to the holder";
    reports_[{report.kind(), report.round()}][report.contributor()] = report;
  }
  size_t offset = 0;
  for (const v1::ChunkHeader& header : frame.control.header()) {
    if (layout_->primary(layout_->table().shard(header.chunk())).address() != client->server) {
      wrong_ = "a push that is not to the primary";
    }
    if (header.contributor() != client->hello.contributor()) wrong_ = "a push in another's name";
    OnPush(header, frame.payload.Sub(offset, header.elements() * sizeof(float)));
    offset += header.elements() * sizeof(float);
  }
  if (offset > 0) {
    client->taken += offset;
    v1::ChunkFrame ack;
    ack.mutable_ack()->set_bytes(client->taken);
    client->stream->Write(EncodeFrame(ack, {}));
  }
  for (const auto& each : clients_) Serve(*each);
}

void FakeServers::OnPush(const v1::ChunkHeader& header, const Payload& payload) {
  Chunk& chunk = chunks_[header.chunk()];
  if (header.round() > chunk.version) wrong_ = "a push ahead of its chunk";
  if (header.round() < chunk.version || !chunk.contributors.insert(header.contributor()).second) return;
  const Range range = layout_->table().range(header.chunk());
  if (header.elements() == 0) {
    ++empty_;
    if (header.count() != 0) wrong_ = "an empty contribution with a count";
  } else {
    std::vector<float> values(range.size());
    if (payload.size() != values.size() * sizeof(float)) {
      wrong_ = "a contribution of the wrong length";
      return;
    }
    payload.CopyTo(values.data());
    for (uint64_t i = 0; i < values.size(); ++i) {
      if (values[i] == CheckedGradient(header.round(), range.begin + i)) continue;
      wrong_ = absl::StrCat("contribution ", header.contributor(), " to round ", header.round(), " of element ",
                            range.begin + i, " is ", values[i]);
    }
  }
  if (chunk.contributors.size() < layout_->ranks()) return;
  chunk.contributors.clear();
  ++chunk.version;
}

void FakeServers::Serve(Client& client) {
  if (client.stream == nullptr || client.hello.generation() != layout_->generation()) return;
  for (auto& [c, want] : client.wants) {
    const Range range = layout_->table().range(c);
    for (; want <= chunks_[c].version; ++want) {
      if (want + 1 < chunks_[c].version) wrong_ = "a version that is gone is wanted";
      auto values = std::make_shared<std::vector<float>>();
      for (uint64_t i = range.begin; i < range.end; ++i) values->push_back(CheckedValue(want, i));
      v1::ChunkFrame frame;
      v1::ChunkHeader* header = frame.add_header();
      header->set_chunk(c);
      header->set_generation(layout_->generation());
      header->set_round(want);
      header->set_elements(range.size());
      client.stream->Write(EncodeFrame(frame, {{values->data(), values->size() * sizeof(float), values}}));
    }
  }
}

}  // namespace sluice
