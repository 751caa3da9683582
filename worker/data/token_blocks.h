// One long sequence of tokens, cut into blocks of `context`: what text and token files become.
#ifndef SLUICE_WORKER_DATA_TOKEN_BLOCKS_H_
#define SLUICE_WORKER_DATA_TOKEN_BLOCKS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "sluice/v1/job.pb.h"
#include "worker/data/dataset.h"

namespace sluice {

// Unit: uint8_t, uint16_t or uint32_t.
template <typename Unit>
struct TokenPart {
  std::string path;  // for messages
  std::vector<Unit> tokens;
};

// `validation` may be nullptr: the last blocks of `train` are held out then. `vocabulary` is what the data says of it
// (0: nothing), `unit` names what is counted ("bytes", "tokens"). INVALID_ARGUMENT: shorter than a block.
template <typename Unit>
absl::StatusOr<std::shared_ptr<const Dataset>> MakeTokenBlocks(const v1::JobSpec& spec, uint32_t vocabulary,
                                                               const std::string& unit,
                                                               std::unique_ptr<TokenPart<Unit>> train,
                                                               std::unique_ptr<TokenPart<Unit>> validation);

// INVALID_ARGUMENT names the first token that is not below `vocabulary`; token i begins at byte offset
// first_byte + i * sizeof(Unit) of the file.
template <typename Unit>
absl::Status CheckInside(const std::string& path, absl::Span<const Unit> tokens, uint64_t first_byte,
                         uint32_t vocabulary);

}  // namespace sluice

#endif  // SLUICE_WORKER_DATA_TOKEN_BLOCKS_H_
