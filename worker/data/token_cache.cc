#include "worker/data/token_cache.h"

#include <openssl/evp.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace sluice {
namespace {

// Numbers and tokens are copied as they lie in memory.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t unit;
  uint64_t count;
  char hash[32];
  uint32_t tokens_crc;
  uint32_t header_crc;
};
static_assert(sizeof(Header) == 64);

constexpr char kMagic[] = "SLUICETK";
constexpr uint32_t kVersion = 1;

uint32_t Crc(const void* data, size_t bytes) {
  return static_cast<uint32_t>(crc32_z(0, static_cast<const Bytef*>(data), bytes));
}

uint32_t HeaderCrc(const Header& header) { return Crc(&header, offsetof(Header, header_crc)); }

}  // namespace

struct ContentHash::State {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~State() { EVP_MD_CTX_free(context); }
};

ContentHash::ContentHash() : state_(std::make_unique<State>()) {
  CHECK(EVP_DigestInit_ex(state_->context, EVP_sha256(), nullptr) == 1);
}

ContentHash::~ContentHash() = default;

void ContentHash::Add(std::string_view part) {
  const uint64_t length = part.size();
  CHECK(EVP_DigestUpdate(state_->context, &length, sizeof(length)) == 1);
  CHECK(EVP_DigestUpdate(state_->context, part.data(), part.size()) == 1);
}

std::string ContentHash::Finish() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int bytes = 0;
  CHECK(EVP_DigestFinal_ex(state_->context, digest, &bytes) == 1);
  return std::string(reinterpret_cast<char*>(digest), bytes);
}

std::string TokenCache::PathOf(const std::string& hash) const {
  return absl::StrCat(folder_, "/", absl::BytesToHexString(hash), ".tokens");
}

template <typename Unit>
absl::StatusOr<std::vector<Unit>> TokenCache::Find(const std::string& hash) const {
  if (!enabled()) return absl::NotFoundError("no folder for tokenized texts");
  const std::string path = PathOf(hash);
  ASSIGN_OR_RETURN(const auto file, InputFile::Open(path));
  const auto damaged = [&path](const char* what) { return absl::DataLossError(absl::StrCat(path, ": ", what)); };
  Header header;
  if (file->size() < sizeof(header)) return damaged("shorter than its header");
  RETURN_IF_ERROR(file->Read(0, &header, sizeof(header)));
  if (memcmp(header.magic, kMagic, 8) != 0 || header.header_crc != HeaderCrc(header)) return damaged("damaged header");
  if (header.version != kVersion || header.unit != sizeof(Unit) || hash.compare(0, 32, header.hash, 32) != 0) {
    return damaged("holds something else");
  }
  if (header.count != (file->size() - sizeof(header)) / sizeof(Unit) ||
      (file->size() - sizeof(header)) % sizeof(Unit) != 0) {
    return damaged("not as long as its header says");
  }
  std::vector<Unit> tokens(header.count);
  RETURN_IF_ERROR(file->Read(sizeof(header), tokens.data(), tokens.size() * sizeof(Unit)));
  if (header.tokens_crc != Crc(tokens.data(), tokens.size() * sizeof(Unit))) return damaged("damaged tokens");
  return tokens;
}

template <typename Unit>
absl::Status TokenCache::Store(const std::string& hash, const std::vector<Unit>& tokens) const {
  if (!enabled()) return absl::OkStatus();
  static std::atomic<uint64_t> made{0};
  RETURN_IF_ERROR(MakeDirectories(folder_));
  const std::string path = PathOf(hash);
  const std::string temporary = absl::StrCat(path, ".tmp-", getpid(), "-", made.fetch_add(1));
  const auto clean = absl::MakeCleanup([&temporary] { RemoveTree(temporary).IgnoreError(); });
  Header header = {};
  memcpy(header.magic, kMagic, 8);
  header.version = kVersion;
  header.unit = sizeof(Unit);
  header.count = tokens.size();
  memcpy(header.hash, hash.data(), std::min<size_t>(hash.size(), 32));
  header.tokens_crc = Crc(tokens.data(), tokens.size() * sizeof(Unit));
  header.header_crc = HeaderCrc(header);
  {
    ASSIGN_OR_RETURN(const auto file, OutputFile::Create(temporary));
    RETURN_IF_ERROR(file->Write(0, &header, sizeof(header)));
    RETURN_IF_ERROR(file->Write(sizeof(header), tokens.data(), tokens.size() * sizeof(Unit)));
    RETURN_IF_ERROR(file->Sync());
  }
  return Rename(temporary, path);
}

template absl::StatusOr<std::vector<uint16_t>> TokenCache::Find(const std::string&) const;
template absl::StatusOr<std::vector<uint32_t>> TokenCache::Find(const std::string&) const;
template absl::Status TokenCache::Store(const std::string&, const std::vector<uint16_t>&) const;
template absl::Status TokenCache::Store(const std::string&, const std::vector<uint32_t>&) const;

}  // namespace sluice
