// health: one question to any daemon, through gRPC's own health service (grpc.health.v1).
#include <google/protobuf/unknown_field_set.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/commands.h"
#include "client/spec_loading.h"
#include "common/rpc.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

constexpr char kCheck[] = "/grpc.health.v1.Health/Check";
constexpr uint64_t kServing = 1;  // HealthCheckResponse.ServingStatus

// HealthCheckResponse {ServingStatus status = 1}, read as fields by number: the one message of that service needs no
// generated code.
absl::StatusOr<uint64_t> ReadStatus(const grpc::ByteBuffer& response) {
  grpc::Slice slice;
  if (!response.DumpToSingleSlice(&slice).ok()) return absl::InternalError("the answer cannot be read");
  google::protobuf::UnknownFieldSet fields;
  if (!fields.ParseFromArray(slice.begin(), static_cast<int>(slice.size()))) {
    return absl::InternalError("the answer is no HealthCheckResponse");
  }
  uint64_t status = 0;
  for (int i = 0; i < fields.field_count(); ++i) {
    const google::protobuf::UnknownField& field = fields.field(i);
    if (field.number() == 1 && field.type() == google::protobuf::UnknownField::TYPE_VARINT) status = field.varint();
  }
  return status;
}

// OK: it serves. UNAVAILABLE: not reached or no answer within `timeout`; INTERNAL: it answered, and does not serve.
absl::Status CheckHealth(const std::string& address, absl::Duration timeout, Interrupt* interrupt) {
  grpc::GenericStub stub(MakeChannel(address));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  grpc::Slice nothing;  // HealthCheckRequest {}: the whole server
  const grpc::ByteBuffer request(&nothing, 1);
  grpc::ByteBuffer response;
  grpc::Status called;
  absl::Notification done;
  {
    const auto handle = interrupt->OnNotify(0, [&context] { context.TryCancel(); });
    stub.UnaryCall(&context, kCheck, grpc::StubOptions(), &request, &response, [&](grpc::Status status) {
      called = std::move(status);
      done.Notify();
    });
    done.WaitForNotification();
  }
  if (interrupt->count() > 0) return absl::CancelledError("interrupted");
  switch (called.error_code()) {
    case grpc::StatusCode::OK:
      break;
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return absl::UnavailableError(absl::StrCat(address, " cannot be reached within ", absl::FormatDuration(timeout),
                                                 ": ", called.error_message(), "; is a daemon listening there?"));
    case grpc::StatusCode::UNIMPLEMENTED:
      return absl::InternalError(
          absl::StrCat("what listens at ", address, " has no health service: it is no Sluice daemon"));
    default:
      return Annotate(FromGrpc(called), address);
  }
  ASSIGN_OR_RETURN(const uint64_t status, ReadStatus(response));
  if (status == kServing) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(address, " answers, and does not serve (status ", status, ")"));
}

}  // namespace

int RunHealth(const Args& args, const ClientEnvironment& environment) {
  std::string address;
  if (args.arguments().empty()) {
    const auto found = FindScheduler(args.String("scheduler"), environment.getenv);
    if (!found.ok()) return Report(found.status(), environment);
    address = found->address;
  } else {
    const auto given = ParseHostPort(args.argument(0), 7700);
    if (!given.ok()) return Report(given.status(), environment);
    address = given->ToString();
  }
  const absl::Status status = CheckHealth(address, absl::Seconds(args.Number("timeout", 5)), environment.interrupt);
  if (!status.ok()) return Report(status, environment);
  *environment.out << address << " serves" << std::endl;
  return kExitOk;
}

}  // namespace sluice
