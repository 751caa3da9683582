#include "server/services.h"

#include <algorithm>

#include "absl/time/time.h"
#include "common/frame.h"
#include "common/rpc.h"

namespace sluice {
namespace {

// Refuses what comes before the node is there.
std::shared_ptr<StreamHandler> NotReady(std::shared_ptr<ByteStream> stream, const std::string&) {
  stream->Close(absl::UnavailableError("the server is starting"));
  return nullptr;
}

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ParameterServiceImpl::Stream(
    grpc::CallbackServerContext* context) {
  ServerNode* node = node_.load();
  return NewAcceptedStream(context, node == nullptr ? Acceptor(NotReady) : node->parameter_acceptor());
}

grpc::Status ParameterServiceImpl::Pull(grpc::ServerContext* context, const v1::PullRequest* request,
                                        grpc::ServerWriter<v1::ChunkFrame>* writer) {
  ServerNode* node = node_.load();
  std::shared_ptr<ServerJob> job = node == nullptr ? nullptr : node->FindJob(request->job_id());
  if (job == nullptr) return {grpc::StatusCode::NOT_FOUND, "job " + request->job_id() + " is not on this server"};
  if (job->layout() == nullptr) {
    return {grpc::StatusCode::UNAVAILABLE, "job " + request->job_id() + ": its plan is not here yet"};
  }
  std::vector<uint64_t> chunks = job->Chunks();
  uint64_t end = UINT64_MAX;
  if (request->chunks() != 0 && request->chunks() <= UINT64_MAX - request->first_chunk()) {
    end = request->first_chunk() + request->chunks();
  }
  std::erase_if(chunks, [&](uint64_t c) { return c < request->first_chunk() || c >= end; });
  if (chunks.empty()) return {grpc::StatusCode::OUT_OF_RANGE, "none of these chunks is on this server"};
  std::optional<uint64_t> version;
  if (request->has_version()) version = request->version();
  const absl::Time deadline = std::min(absl::FromChrono(context->deadline()), absl::Now() + absl::Minutes(5));
  v1::ChunkFrame frame;
  for (size_t i = 0; i < chunks.size(); ++i) {
    absl::StatusOr<std::pair<uint64_t, ChunkValue>> got = job->GetChunk(chunks[i], version, deadline);
    if (!got.ok()) return ToGrpc(got.status());
    v1::ChunkHeader* header = frame.add_header();
    header->set_chunk(chunks[i]);
    header->set_generation(job->generation());
    header->set_round(got->first);
    header->set_elements(got->second.elements);
    frame.mutable_payload()->append(reinterpret_cast<const char*>(got->second.data.get()),
                                    got->second.elements * sizeof(float));
    if (frame.payload().size() >= kMaxFramePayload || i + 1 == chunks.size()) {
      if (!writer->Write(frame)) return {grpc::StatusCode::CANCELLED, "the client left"};
      frame.Clear();
    }
  }
  return grpc::Status::OK;
}

grpc::Status ParameterServiceImpl::GetPlan(grpc::ServerContext*, const v1::GetPlanRequest* request,
                                           v1::GetPlanResponse* response) {
  ServerNode* node = node_.load();
  if (node == nullptr) return {grpc::StatusCode::UNAVAILABLE, "the server is starting"};
  absl::StatusOr<v1::GetPlanResponse> plan = node->GetPlan(*request);
  if (!plan.ok()) return ToGrpc(plan.status());
  *response = *std::move(plan);
  return grpc::Status::OK;
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ShardServiceImpl::Stream(
    grpc::CallbackServerContext* context) {
  ServerNode* node = node_.load();
  return NewAcceptedStream(context, node == nullptr ? Acceptor(NotReady) : node->shard_acceptor());
}

}  // namespace sluice
