#include "common/grpc_transport.h"

#include <grpc/grpc.h>
#include <grpcpp/alarm.h>
#include <grpcpp/client_context.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

using grpc::ByteBuffer;

// How long a stream that was closed in order may take to send what was written and to hear the peer's end.
constexpr std::chrono::seconds kLinger{2};

// Trailing metadata of a stream that an acceptor's owner closed: tells its status from one that gRPC made up.
constexpr char kClosedKey[] = "sluice-closed";

// ByteBuffer has no move, only a copy (of references, with allocations) and Swap.
ByteBuffer Take(ByteBuffer* buffer) {
  ByteBuffer taken;
  taken.Swap(buffer);
  return taken;
}

const char* Method(Plane plane) {
  switch (plane) {
    case Plane::kSession:
      return "/sluice.v1.SchedulerService/Session";
    case Plane::kParameter:
      return "/sluice.v1.ParameterService/Stream";
    case Plane::kShard:
      return "/sluice.v1.ShardService/Stream";
    case Plane::kPeer:
      return "/sluice.v1.PeerService/Stream";
    case Plane::kMail:
      return "/sluice.v1.PeerService/Mail";
  }
  CHECK(false, "no such plane: {}", static_cast<int>(plane));
}

// What both kinds of reactor share: the queue of writes, and events for the handler. All gRPC operations start with the
// mutex held (they never call back inline), so that none is started after the stream's end. Handlers and the release of
// buffers (their owners' code) run without it.
//
// Life of a stream: reads and writes, then `writable_` falls (own Close, or the peer's end), the queue drains or is
// dropped, EndWrites() runs once, gRPC finishes all operations, and its OnDone gives the handler OnClosed.
class StreamEnd : public std::enable_shared_from_this<StreamEnd> {
 public:
  virtual ~StreamEnd() = default;

  void Write(ByteBuffer message) {
    CHECK(message.Valid(), "Write of a buffer that holds no message");
    const size_t bytes = message.Length();
    absl::MutexLock lock(&mutex_);
    if (!writable_) return;
    queue_.emplace_back(&message, bytes);
    queued_bytes_ += bytes;
    Advance();
  }

  void WriteLatest(ByteBuffer message) {
    CHECK(message.Valid(), "WriteLatest of a buffer that holds no message");
    Item item(&message, message.Length());
    absl::MutexLock lock(&mutex_);
    if (!writable_) return;
    queued_bytes_ += item.bytes;
    if (latest_ != nullptr) {
      queued_bytes_ -= latest_->bytes;
      *latest_ = std::move(item);
      return;
    }
    queue_.push_back(std::move(item));
    latest_ = &queue_.back();
    Advance();
  }

  size_t queued_bytes() const {
    absl::MutexLock lock(&mutex_);
    return queued_bytes_;
  }

  void Close(const absl::Status& status, bool cut = false) {
    std::deque<Item> dropped;
    absl::MutexLock lock(&mutex_);
    if (own_close_.has_value() || over_) return;
    own_close_ = status;
    writable_ = false;
    Linger();
    if (cut || CutsOnClose(status)) {
      for (const Item& item : queue_) queued_bytes_ -= item.bytes;
      dropped.swap(queue_);
      latest_ = nullptr;
      Cancel();
    }
    Advance();
  }

  bool closing() const {
    absl::MutexLock lock(&mutex_);
    return own_close_.has_value();
  }

 protected:
  explicit StreamEnd(std::shared_ptr<StreamHandler> handler) : handler_(std::move(handler)) {}

  // Operations of the reactor. `buffer` stays until the operation is done.
  virtual void BeginWrite(const ByteBuffer* buffer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;
  virtual void BeginRead(ByteBuffer* buffer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;
  // No write will follow: half-close (client) or finish the call (server). Called once.
  virtual void EndWrites() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;
  virtual void Cancel() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;
  virtual bool CutsOnClose(const absl::Status& status) const = 0;
  // Whether a further read is of use: an opening end reads to the peer's status, which comes behind its messages.
  virtual bool ReadsOn() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;

  // ------------------------------------------------------------- events from gRPC
  void WriteDone(bool ok) {
    bool tell;
    {
      Item written;
      std::deque<Item> dropped;
      absl::MutexLock lock(&mutex_);
      written = std::move(current_);
      writing_ = false;
      queued_bytes_ -= written.bytes;
      if (!ok) Abandon(&dropped);
      Advance();
      tell = ok && reading_;
    }
    if (tell) handler_->OnWritten();  // gRPC's last event comes when this has returned
  }

  void ReadDone(bool ok) {
    {
      std::deque<Item> dropped;
      absl::MutexLock lock(&mutex_);
      if (!ok) {
        Abandon(&dropped);
        Linger();
        Advance();
        return;
      }
    }
    const bool wanted = !closing();
    ByteBuffer message = Take(&read_buffer_);
    if (wanted) handler_->OnMessage(Take(&message));  // handler_ changes only before the first read and in Done
    message.Clear();
    absl::MutexLock lock(&mutex_);
    if (ReadsOn()) BeginRead(&read_buffer_);
  }

  // The peer's end or a broken connection is known although a read may be outstanding.
  void Broken() {
    std::deque<Item> dropped;
    absl::MutexLock lock(&mutex_);
    Abandon(&dropped);
    Advance();
  }

  // gRPC's last event; `outcome` says what the stream ended with unless it was closed here. It is asked with the mutex
  // held, so that it sees what the thread that began the stream wrote.
  void Done(absl::FunctionRef<absl::Status()> outcome) {
    std::deque<Item> dropped;
    absl::Status status;
    {
      absl::MutexLock lock(&mutex_);
      Abandon(&dropped);
      over_ = true;
      status = own_close_.has_value() ? *own_close_ : outcome();
      if (alarm_.has_value()) alarm_->Cancel();
    }
    dropped.clear();
    if (handler_ != nullptr) handler_->OnClosed(status);
    handler_ = nullptr;
  }

  void StartReading() {
    absl::MutexLock lock(&mutex_);
    reading_ = true;
    BeginRead(&read_buffer_);
  }

  mutable absl::Mutex mutex_;
  std::shared_ptr<StreamHandler> handler_;  // written before the first event and in Done only
  std::optional<absl::Status> own_close_ ABSL_GUARDED_BY(mutex_);
  bool writes_ended_ ABSL_GUARDED_BY(mutex_) = false;

 private:
  struct Item {
    Item() = default;
    Item(ByteBuffer* taken, size_t n) : buffer(Take(taken)), bytes(n) {}
    Item(Item&& other) noexcept : buffer(Take(&other.buffer)), bytes(std::exchange(other.bytes, 0)) {}
    Item& operator=(Item&& other) noexcept {
      buffer.Swap(&other.buffer);
      std::swap(bytes, other.bytes);
      return *this;
    }
    ByteBuffer buffer;
    size_t bytes = 0;
  };

  // Starts what can be started.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || writes_ended_) return;
    if (!queue_.empty()) {
      if (latest_ == &queue_.front()) latest_ = nullptr;
      current_ = std::move(queue_.front());
      queue_.pop_front();
      writing_ = true;
      BeginWrite(&current_.buffer);
    } else if (!writable_) {
      writes_ended_ = true;
      EndWrites();
    }
  }

  // Writes lead nowhere any more.
  void Abandon(std::deque<Item>* dropped) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    writable_ = false;
    for (const Item& item : queue_) queued_bytes_ -= item.bytes;
    dropped->swap(queue_);
    latest_ = nullptr;
  }

  // Cancels the call unless it ends by itself soon.
  void Linger() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (alarm_.has_value()) return;
    alarm_.emplace();
    alarm_->Set(std::chrono::system_clock::now() + kLinger, [weak = weak_from_this()](bool fired) {
      if (!fired) return;
      if (const auto self = weak.lock()) {
        absl::MutexLock lock(&self->mutex_);
        if (!self->over_) self->Cancel();
      }
    });
  }

  std::deque<Item> queue_ ABSL_GUARDED_BY(mutex_);
  Item* latest_ ABSL_GUARDED_BY(mutex_) = nullptr;  // in queue_: the last one by WriteLatest
  Item current_ ABSL_GUARDED_BY(mutex_);            // with gRPC while writing_
  size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;  // has been started: there is a handler
  bool writable_ ABSL_GUARDED_BY(mutex_) = true;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<grpc::Alarm> alarm_ ABSL_GUARDED_BY(mutex_);
  ByteBuffer read_buffer_;  // with gRPC while a read is outstanding, else with the thread of ReadDone
};

// What users hold.
class Handle : public ByteStream {
 public:
  explicit Handle(std::shared_ptr<StreamEnd> end) : end_(std::move(end)) {}
  ~Handle() override { end_->Close(absl::OkStatus()); }
  void Write(ByteBuffer message) override { end_->Write(Take(&message)); }
  void WriteLatest(ByteBuffer message) override { end_->WriteLatest(Take(&message)); }
  size_t queued_bytes() const override { return end_->queued_bytes(); }
  void Close(const absl::Status& status) override { end_->Close(status); }
  void Cut(const absl::Status& status) override { end_->Close(status, /*cut=*/true); }

 private:
  const std::shared_ptr<StreamEnd> end_;
};

class AcceptedStream final : public grpc::ServerBidiReactor<ByteBuffer, ByteBuffer>, public StreamEnd {
 public:
  explicit AcceptedStream(grpc::CallbackServerContext* context) : StreamEnd(nullptr), context_(context) {}

  void Begin(const Acceptor& acceptor) {
    self_ = std::static_pointer_cast<AcceptedStream>(shared_from_this());
    keep_ = std::make_shared<Handle>(self_);
    handler_ = acceptor(keep_, context_->peer());
    if (handler_ == nullptr) {
      Close(absl::UnavailableError("the stream was refused"));
      return;
    }
    StartReading();
  }

  void OnReadDone(bool ok) override { ReadDone(ok); }
  void OnWriteDone(bool ok) override { WriteDone(ok); }
  void OnCancel() override {
    {
      absl::MutexLock lock(&mutex_);
      cancelled_ = true;
    }
    Broken();
  }
  void OnDone() override {
    // OnCancel comes before OnDone, whatever the order of the reads' and writes' failures.
    Done([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return cancelled_ ? absl::UnavailableError(absl::StrCat("the peer ", peer_, " died or cut the stream"))
                        : absl::OkStatus();
    });
    keep_ = nullptr;
    const std::shared_ptr<AcceptedStream> last = std::move(self_);
  }

 protected:
  void BeginWrite(const ByteBuffer* buffer) override { StartWrite(buffer); }
  void BeginRead(ByteBuffer* buffer) override { StartRead(buffer); }
  void EndWrites() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (own_close_.has_value()) {
      context_->AddTrailingMetadata(kClosedKey, "1");
      Finish(ToGrpc(*own_close_));
    } else {
      Finish(cancelled_ ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "the stream broke") : grpc::Status::OK);
    }
  }
  void Cancel() override { context_->TryCancel(); }
  bool CutsOnClose(const absl::Status& status) const override { return false; }
  bool ReadsOn() const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !own_close_.has_value() && !writes_ended_;
  }

 private:
  grpc::CallbackServerContext* const context_;  // gRPC's, until OnDone has returned
  const std::string peer_ = context_->peer();
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<ByteStream> keep_;
  std::shared_ptr<AcceptedStream> self_;
};

class OpenedStream final : public grpc::ClientBidiReactor<ByteBuffer, ByteBuffer>, public StreamEnd {
 public:
  OpenedStream(std::string address, std::shared_ptr<StreamHandler> handler, std::function<void(OpenedStream*)> done)
      : StreamEnd(std::move(handler)), address_(std::move(address)), done_(std::move(done)) {}

  // Makes the call; nothing is sent and no event comes before Begin.
  void Prepare(const std::shared_ptr<grpc::Channel>& channel, Plane plane) {
    grpc::GenericStub(channel).PrepareBidiStreamingCall(context_.get(), Method(plane), grpc::StubOptions(), this);
  }

  void Begin() {
    AddHold();  // writes start outside of reactions
    StartReading();
    StartCall();
  }

  void OnReadDone(bool ok) override { ReadDone(ok); }
  void OnWriteDone(bool ok) override { WriteDone(ok); }
  void OnDone(const grpc::Status& status) override {
    Done([&] { return Understand(status); });
    context_ = nullptr;  // holds the channel: see GrpcTransport::State
    const auto done = std::move(done_);
    done(this);  // may drop the last reference
  }

 protected:
  void BeginWrite(const ByteBuffer* buffer) override { StartWrite(buffer); }
  void BeginRead(ByteBuffer* buffer) override { StartRead(buffer); }
  void EndWrites() override {
    StartWritesDone();
    RemoveHold();
  }
  void Cancel() override { context_->TryCancel(); }
  bool CutsOnClose(const absl::Status& status) const override { return !status.ok(); }
  bool ReadsOn() const override { return true; }

 private:
  absl::Status Understand(const grpc::Status& status) const {
    if (status.error_code() == grpc::StatusCode::CANCELLED &&
        context_->GetServerTrailingMetadata().count(kClosedKey) == 0) {
      return absl::UnavailableError(absl::StrCat(address_, " broke the stream: ", status.error_message()));
    }
    return Annotate(FromGrpc(status), address_);
  }

  const std::string address_;
  std::unique_ptr<grpc::ClientContext> context_ = std::make_unique<grpc::ClientContext>();  // until OnDone
  std::function<void(OpenedStream*)> done_;
};

// Whether gRPC will be able to listen there; says why not better than it does.
absl::Status ProbeListen(const HostPort& at) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int lookup = getaddrinfo(at.host.c_str(), std::to_string(at.port).c_str(), &hints, &found);
  if (lookup != 0) {
    return absl::InvalidArgumentError(absl::StrCat("cannot listen at ", at.ToString(), ": ", gai_strerror(lookup),
                                                   "; give an address of this machine"));
  }
  bool usable = false;
  int error = EADDRNOTAVAIL;
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    const int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(fd, a->ai_addr, a->ai_addrlen) == 0) {
      usable = true;
    } else if (error != EADDRINUSE) {
      error = errno;
    }
    close(fd);
  }
  freeaddrinfo(found);
  if (error == EADDRINUSE) {
    return absl::AlreadyExistsError(absl::StrCat("cannot listen at ", at.ToString(), ": the port is in use by another ",
                                                 "process; stop that one, or take another port (0: any free one)"));
  }
  if (usable) return absl::OkStatus();
  const std::string why = absl::StrCat("cannot listen at ", at.ToString(), ": ", std::strerror(error));
  if (error == EACCES) return absl::PermissionDeniedError(absl::StrCat(why, "; ports below 1024 need privileges"));
  return absl::InvalidArgumentError(absl::StrCat(why, "; give an address of this machine"));
}

}  // namespace

grpc::ServerBidiReactor<ByteBuffer, ByteBuffer>* NewAcceptedStream(grpc::CallbackServerContext* context,
                                                                   const Acceptor& acceptor) {
  const auto stream = std::make_shared<AcceptedStream>(context);
  stream->Begin(acceptor);
  return stream.get();
}

GrpcServer::GrpcServer(std::unique_ptr<grpc::Server> server, std::string address, int port)
    : server_(std::move(server)), address_(std::move(address)), port_(port) {}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const GrpcServerOptions& options,
                                                              const std::vector<grpc::Service*>& services) {
  RETURN_IF_ERROR(CheckListenAllowed(options.listen, options.insecure));
  RETURN_IF_ERROR(ProbeListen(options.listen));
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(options.listen.ToString(), grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  for (grpc::Service* service : services) builder.RegisterService(service);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || port == 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen at ", options.listen.ToString(), ": gRPC could not start its server there"));
  }
  HostPort reachable = options.advertise;
  if (reachable.host.empty()) reachable.host = options.listen.host;
  if (reachable.port == 0) reachable.port = port;
  return std::unique_ptr<GrpcServer>(new GrpcServer(std::move(server), reachable.ToString(), port));
}

GrpcServer::~GrpcServer() { Shutdown(); }

void GrpcServer::Shutdown(absl::Duration grace) { server_->Shutdown(absl::ToChronoTime(absl::Now() + grace)); }

// gRPC's callback threads end with the last channel (or server) that used them, and whoever drops that one joins them.
// So it must never be dropped by one of these threads: `pin` stays until the transport's destructor, and streams let go
// of their channels before they leave `live`.
struct GrpcTransport::State {
  std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::shared_ptr<grpc::Channel>& channel = channels[address];
    if (channel != nullptr) {
      const grpc_connectivity_state state = channel->GetState(false);
      // A failed channel answers with its last failure until its own time to retry: a new one tries at once.
      if (state == GRPC_CHANNEL_TRANSIENT_FAILURE || state == GRPC_CHANNEL_SHUTDOWN) channel = nullptr;
    }
    if (channel == nullptr) channel = MakeChannel(address);
    if (pin == nullptr) pin = channel;
    return channel;
  }

  absl::Mutex mutex;
  std::map<std::string, std::shared_ptr<grpc::Channel>> channels ABSL_GUARDED_BY(mutex);
  std::shared_ptr<grpc::Channel> pin ABSL_GUARDED_BY(mutex);
  std::map<OpenedStream*, std::shared_ptr<OpenedStream>> live ABSL_GUARDED_BY(mutex);
};

GrpcTransport::GrpcTransport() : state_(std::make_shared<State>()) {}

GrpcTransport::~GrpcTransport() {
  std::vector<std::shared_ptr<OpenedStream>> streams;
  {
    absl::MutexLock lock(&state_->mutex);
    for (const auto& [key, stream] : state_->live) streams.push_back(stream);
  }
  // Those that were closed in order keep their time to send what was written.
  for (const auto& stream : streams) stream->Close(absl::CancelledError("this end shuts down"));
  streams.clear();
  std::map<std::string, std::shared_ptr<grpc::Channel>> channels;
  std::shared_ptr<grpc::Channel> pin;  // both dropped here, by this thread, without the mutex
  absl::MutexLock lock(&state_->mutex);
  const auto none = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex) { return state_->live.empty(); };
  state_->mutex.Await(absl::Condition(&none));
  channels.swap(state_->channels);
  pin.swap(state_->pin);
}

std::shared_ptr<ByteStream> GrpcTransport::Open(const std::string& address, Plane plane,
                                                std::shared_ptr<StreamHandler> handler) {
  const auto done = [state = state_](OpenedStream* stream) {
    std::shared_ptr<OpenedStream> last;  // released without the mutex
    absl::MutexLock lock(&state->mutex);
    const auto it = state->live.find(stream);
    last = std::move(it->second);
    state->live.erase(it);
  };
  auto stream = std::make_shared<OpenedStream>(address, std::move(handler), done);
  {
    absl::MutexLock lock(&state_->mutex);
    stream->Prepare(state_->ChannelTo(address), plane);
    state_->live.emplace(stream.get(), stream);
  }
  stream->Begin();
  return std::make_shared<Handle>(std::move(stream));
}

}  // namespace sluice
