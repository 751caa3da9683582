// Hugging Face GPT-2 folders in: names, dtypes and shapes checked against the model, then ranges read in place.
#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/gpt2_folder.h"
#include "common/gpt2_tensors.h"
#include "common/safetensors.h"
#include "common/status_macros.h"
#include "common/weight_files.h"

namespace sluice {
namespace {

constexpr char kHead[] = "lm_head.weight";
constexpr size_t kListed = 8;  // tensors of one fault that a message names

// "h.3.attn.bias" and "h.3.attn.masked_bias": the causal mask, a constant that old files hold.
bool IsMask(const std::string& name) {
  return absl::StartsWith(name, "h.") &&
         (absl::EndsWith(name, ".attn.bias") || absl::EndsWith(name, ".attn.masked_bias"));
}

std::string Listed(const std::vector<std::string>& items) {
  const size_t shown = std::min(items.size(), kListed);
  std::string text = absl::StrJoin(items.begin(), items.begin() + static_cast<std::ptrdiff_t>(shown), ", ");
  if (shown < items.size()) absl::StrAppend(&text, " and ", items.size() - shown, " more");
  return text;
}

class Reader : public Gpt2FolderReader {
 public:
  Reader(ParameterSpace space, std::vector<Gpt2Source> sources, std::vector<WeightFiles::Place> places,
         WeightFiles::Place head, std::unique_ptr<WeightFiles> files)
      : space_(std::move(space)),
        sources_(std::move(sources)),
        places_(std::move(places)),
        head_(head),
        files_(std::move(files)) {}

  absl::Status Read(uint64_t first, absl::Span<float> values) const override {
    if (first > space_.size() || values.size() > space_.size() - first) {
      return absl::OutOfRangeError(absl::StrCat(files_->path(), ": the model has ", space_.size(),
                                                " elements, asked for ", values.size(), " from ", first));
    }
    for (size_t i = values.empty() ? 0 : space_.TensorAt(first); !values.empty(); ++i) {
      const Tensor& tensor = space_.tensors()[i];
      const uint64_t skip = first - tensor.offset;
      const size_t n = std::min<uint64_t>(values.size(), tensor.elements - skip);
      RETURN_IF_ERROR(ReadTensor(i, skip, values.subspan(0, n)));
      if (head_.file != nullptr && tensor.name == "wte") RETURN_IF_ERROR(CheckHead(skip, values.subspan(0, n)));
      values.remove_prefix(n);
      first += n;
    }
    return absl::OkStatus();
  }

 private:
  // Elements from `skip` on of our tensor i.
  absl::Status ReadTensor(size_t i, uint64_t skip, absl::Span<float> values) const {
    const Gpt2Source& source = sources_[i];
    if (!source.transposed) return places_[i].Read(source.first_column + skip, values);
    const uint64_t in = source.shape[0], columns = source.shape[1];
    // The range touches our rows [begin, end): columns of the file, read row by row.
    const uint64_t begin = skip / in, end = (skip + values.size() + in - 1) / in;
    std::vector<float> row(end - begin);
    for (uint64_t k = 0; k < in; ++k) {
      RETURN_IF_ERROR(places_[i].Read(k * columns + source.first_column + begin, absl::MakeSpan(row)));
      for (uint64_t o = begin; o < end; ++o) {
        const uint64_t at = o * in + k;
        if (at >= skip && at - skip < values.size()) values[at - skip] = row[o - begin];
      }
    }
    return absl::OkStatus();
  }

  // The head's elements from `skip` on are those of the embedding, `values`.
  absl::Status CheckHead(uint64_t skip, absl::Span<const float> values) const {
    float buffer[4096];
    for (size_t at = 0; at < values.size(); at += std::size(buffer)) {
      const auto part = absl::MakeSpan(buffer, std::min(std::size(buffer), values.size() - at));
      RETURN_IF_ERROR(head_.Read(skip + at, part));
      if (std::memcmp(part.data(), values.data() + at, part.size() * sizeof(float)) == 0) continue;
      for (size_t i = 0; i < part.size(); ++i) {
        if (std::memcmp(&part[i], &values[at + i], sizeof(float)) == 0) continue;
        return absl::InvalidArgumentError(
            absl::StrCat(head_.file->file().path(), ": tensor \"", head_.tensor->name,
                         "\" differs from wte.weight at element ", skip + at + i, " (", part[i], " and ",
                         values[at + i], "): the model has a head of its own, supported are tied embeddings"));
      }
    }
    return absl::OkStatus();
  }

  const ParameterSpace space_;
  const std::vector<Gpt2Source> sources_;         // of space_.tensors()
  const std::vector<WeightFiles::Place> places_;  // the same
  const WeightFiles::Place head_;                 // no file: there is none
  const std::unique_ptr<WeightFiles> files_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Gpt2FolderReader>> Gpt2FolderReader::Open(const std::string& folder,
                                                                         const v1::Gpt2Spec& spec) {
  ASSIGN_OR_RETURN(const v1::Gpt2Spec found, ReadGpt2Config(folder));
  RETURN_IF_ERROR(CheckGpt2Config(folder, found, spec));
  ASSIGN_OR_RETURN(ParameterSpace space, Gpt2Space(spec));
  ASSIGN_OR_RETURN(std::unique_ptr<WeightFiles> files, WeightFiles::Open(folder));

  std::map<std::string, WeightFiles::Place> by_name;  // prefix taken off
  for (const auto& [full_name, place] : files->tensors()) {
    constexpr char kPrefix[] = "transformer.";
    const std::string name = absl::StartsWith(full_name, kPrefix) ? full_name.substr(sizeof(kPrefix) - 1) : full_name;
    if (IsMask(name)) continue;
    if (!by_name.emplace(name, place).second) {
      return absl::InvalidArgumentError(absl::StrCat(files->path(), ": tensor \"", name,
                                                     "\" is there with and without the prefix \"", kPrefix, "\""));
    }
  }
  std::vector<std::string> missing, wrong, unknown;
  const auto check = [&](const WeightFiles::Place& place, const std::vector<uint64_t>& shape) {
    const SafetensorsTensor& tensor = *place.tensor;
    const bool readable = FloatFormatOf(tensor.dtype).has_value();
    if (readable && tensor.shape == shape) return;
    wrong.push_back(absl::StrCat("tensor \"", tensor.name, "\": expected ",
                                 readable ? tensor.dtype : "F32, F16 or BF16", " ", ShapeString(shape), ", found ",
                                 tensor.dtype, " ", ShapeString(tensor.shape)));
  };
  std::vector<Gpt2Source> sources;
  std::vector<WeightFiles::Place> places;
  std::set<std::string> used;
  for (const Tensor& tensor : space.tensors()) {
    const Gpt2Source& source = sources.emplace_back(Gpt2SourceOf(tensor, spec.width()));
    const auto at = by_name.find(source.name);
    places.push_back(at == by_name.end() ? WeightFiles::Place{} : at->second);
    if (!used.insert(source.name).second) continue;  // c_attn holds three of ours
    if (at == by_name.end()) {
      missing.push_back(absl::StrCat("\"", source.name, "\" ", ShapeString(source.shape)));
    } else {
      check(at->second, source.shape);
    }
  }
  WeightFiles::Place head;
  if (const auto at = by_name.find(kHead); at != by_name.end()) {
    head = at->second;
    used.insert(kHead);
    check(head, {spec.vocabulary(), spec.width()});
  }
  for (const auto& [name, place] : by_name) {
    if (used.count(name) == 0) unknown.push_back(absl::StrCat("\"", place.tensor->name, "\""));
  }
  std::vector<std::string> faults;
  if (!missing.empty()) faults.push_back(absl::StrCat("missing: ", Listed(missing)));
  if (!wrong.empty()) faults.push_back(Listed(wrong));
  if (!unknown.empty()) faults.push_back(absl::StrCat("unknown: ", Listed(unknown)));
  if (!faults.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        files->path(), ": does not hold a GPT-2 of ", spec.layers(), " layers, width ", spec.width(), ", context ",
        spec.context(), ", vocabulary ", spec.vocabulary(), ": ", absl::StrJoin(faults, "; ")));
  }
  return std::make_unique<Reader>(std::move(space), std::move(sources), std::move(places), head, std::move(files));
}

}  // namespace sluice
