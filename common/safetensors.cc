#include "common/safetensors.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/file_kind.h"
#include "common/status_macros.h"
#include "nlohmann/json.hpp"

namespace sluice {
namespace {

using nlohmann::json;

constexpr char kMetadata[] = "__metadata__";

// Of one element; 0: unknown. The table of the reference library, version 0.8.
uint64_t DtypeBits(const std::string& dtype) {
  static constexpr std::pair<std::string_view, uint64_t> kSizes[] = {
      {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"BOOL", 8},        {"U8", 8},          {"I8", 8},
      {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
      {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
      {"I64", 64},    {"U64", 64},    {"F64", 64},    {"C64", 64}};
  for (const auto& [name, bits] : kSizes) {
    if (dtype == name) return bits;
  }
  return 0;
}

// Takes the header's JSON apart as it is read, so that a key given twice is seen and nothing is built from nonsense.
// Every callback returns false to stop, with the reason in error_.
class HeaderReader : public nlohmann::json_sax<json> {
 public:
  const std::string& error() const { return error_; }
  SafetensorsHeader Take() { return {std::move(tensors_), std::move(metadata_)}; }

  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a boolean"); }
  bool number_integer(number_integer_t value) override {
    return Unexpected(absl::StrCat("the negative number ", value));
  }
  bool number_float(number_float_t, const string_t& text) override { return Unexpected("the fraction " + text); }
  bool binary(binary_t&) override { return Unexpected("bytes"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (where_ == kShape) {
      tensors_.back().shape.push_back(value);
    } else if (where_ == kOffsets) {
      offsets_.push_back(value);
    } else {
      return Unexpected(absl::StrCat("the number ", value));
    }
    return true;
  }

  bool string(string_t& value) override {
    if (where_ == kMetadataMap) {
      metadata_[field_] = value;
    } else if (where_ == kTensor && field_ == "dtype") {
      tensors_.back().dtype = value;
    } else {
      return Unexpected(absl::StrCat("the string \"", value, "\""));
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (where_ == kOutside) {
      where_ = kTop;
    } else if (where_ == kTop) {
      fields_.clear();
      where_ = name_ == kMetadata ? kMetadataMap : kTensor;
      if (where_ == kTensor) tensors_.emplace_back().name = name_;
    } else {
      return Unexpected("an object");
    }
    return true;
  }

  bool key(string_t& key) override {
    if (where_ == kTop) {
      name_ = key;
      return names_.insert(key).second || Fail("the name is given twice");
    }
    field_ = key;
    if (!fields_.insert(key).second) return Fail(absl::StrCat("\"", key, "\" is given twice"));
    if (where_ == kTensor && key != "dtype" && key != "shape" && key != "data_offsets") {
      return Fail(absl::StrCat("unknown field \"", key, "\", expected dtype, shape and data_offsets"));
    }
    return true;
  }

  bool end_object() override {
    if (where_ == kTensor && fields_.size() != 3) return Fail("expected dtype, shape and data_offsets, one is missing");
    where_ = where_ == kTop ? kOutside : kTop;
    return true;
  }

  bool start_array(std::size_t) override {
    if (where_ != kTensor || field_ == "dtype") return Unexpected("a list");
    where_ = field_ == "shape" ? kShape : kOffsets;
    offsets_.clear();
    return true;
  }

  bool end_array() override {
    if (where_ == kOffsets) {
      if (offsets_.size() != 2) {
        return Fail(absl::StrCat("data_offsets has ", offsets_.size(), " numbers, expected 2 (begin and end)"));
      }
      tensors_.back().begin = offsets_[0];
      tensors_.back().end = offsets_[1];
    }
    where_ = kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    // The library's text ends with the reason: "[json.exception.parse_error.101] parse error at ...: syntax error ...".
    const std::string text = error.what();
    const size_t colon = text.find(": ");
    error_ = absl::StrCat("the header is not JSON: byte ", position, ": ",
                          colon == std::string::npos ? text : text.substr(colon + 2));
    return false;
  }

 private:
  enum Where { kOutside, kTop, kMetadataMap, kTensor, kShape, kOffsets };

  bool Fail(const std::string& fault) {
    error_ = where_ == kOutside ? fault : absl::StrCat("tensor \"", name_, "\": ", fault);
    return false;
  }
  bool Unexpected(const std::string& what) {
    switch (where_) {
      case kOutside:
        return Fail(absl::StrCat("the header is ", what, ", expected an object"));
      case kTop:
        return Fail(absl::StrCat("expected an object with dtype, shape and data_offsets, found ", what));
      case kMetadataMap:
        error_ = absl::StrCat("__metadata__: \"", field_, "\" is ", what, ", expected a string");
        return false;
      case kTensor:
      case kShape:
      case kOffsets:
        return Fail(absl::StrCat(field_, " holds ", what, ", expected ",
                                 field_ == "dtype" ? "a string" : "a list of whole numbers from 0 on"));
    }
    return false;
  }

  Where where_ = kOutside;
  std::string name_, field_, error_;
  absl::flat_hash_set<std::string> names_, fields_;
  std::vector<uint64_t> offsets_;
  std::vector<SafetensorsTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

// Dtype, shape and the number of bytes belong together. Sets `elements`.
absl::Status CheckSize(SafetensorsTensor& tensor) {
  const auto fault = [&](const auto&... parts) {
    return absl::DataLossError(absl::StrCat("tensor \"", tensor.name, "\": ", parts...));
  };
  const uint64_t width = DtypeBits(tensor.dtype);
  if (width == 0) return fault("unknown dtype \"", tensor.dtype, "\"");
  if (tensor.end < tensor.begin) {
    return fault("data_offsets [", tensor.begin, ", ", tensor.end, "] end before they begin");
  }
  uint64_t elements = 1, bits = 0;
  bool fits = true;
  for (const uint64_t dimension : tensor.shape) fits = fits && !__builtin_mul_overflow(elements, dimension, &elements);
  if (!fits || __builtin_mul_overflow(elements, width, &bits)) {
    return fault("shape ", ShapeString(tensor.shape), " has more than 2^64 bits");
  }
  if (bits % 8 != 0) {
    return fault(tensor.dtype, " ", ShapeString(tensor.shape), " has ", bits, " bits, no whole number of bytes");
  }
  if (tensor.end - tensor.begin != bits / 8) {
    return fault("data_offsets [", tensor.begin, ", ", tensor.end, "] hold ", tensor.end - tensor.begin, " bytes, but ",
                 tensor.dtype, " ", ShapeString(tensor.shape), " needs ", bits / 8);
  }
  tensor.elements = elements;
  return absl::OkStatus();
}

// What stands where the weights should: "; it is a Git LFS pointer ...", or the reason given.
std::string KindOr(const InputFile& file, std::string reason) {
  std::string first(std::min<uint64_t>(file.size(), 512), '\0');
  if (!file.Read(0, first.data(), first.size()).ok()) return reason;
  const std::string kind = ForeignKind(first);
  if (!kind.empty()) return "expected a safetensors file, but " + kind;
  if (first[0] == '{') return "expected a safetensors file, but it is JSON text";
  return reason;
}

}  // namespace

std::string ShapeString(absl::Span<const uint64_t> shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view text, uint64_t data_bytes) {
  HeaderReader reader;
  // The parser would skip a byte-order mark.
  if (text.substr(0, 3) == "\xef\xbb\xbf") return absl::DataLossError("the header is not JSON: it begins with a BOM");
  if (!json::sax_parse(text, &reader)) return absl::DataLossError(reader.error());
  SafetensorsHeader header = reader.Take();
  for (SafetensorsTensor& tensor : header.tensors) RETURN_IF_ERROR(CheckSize(tensor));
  std::sort(header.tensors.begin(), header.tensors.end(), [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  uint64_t end = 0;
  for (const SafetensorsTensor& tensor : header.tensors) {
    if (tensor.begin != end) {
      return absl::DataLossError(absl::StrCat("tensor \"", tensor.name, "\": data_offsets [", tensor.begin, ", ",
                                              tensor.end, "] leave a hole or overlap: the tensors before it end at ",
                                              end));
    }
    end = tensor.end;
  }
  if (end != data_bytes) {
    return absl::DataLossError(absl::StrCat("the header describes ", end, " bytes of data, the file has ", data_bytes,
                                            end > data_bytes ? ": it is cut short" : ""));
  }
  return header;
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  ASSIGN_OR_RETURN(std::unique_ptr<InputFile> file, InputFile::Open(path));
  const auto fault = [&](const auto&... parts) { return absl::DataLossError(absl::StrCat(path, ": ", parts...)); };
  if (file->size() < 8) {
    return fault(KindOr(*file, absl::StrCat("expected a safetensors file, found ", file->size(),
                                            " bytes (the header's length alone has 8)")));
  }
  uint64_t length = 0;
  RETURN_IF_ERROR(file->Read(0, &length, 8));
  if (length > kMaxHeaderBytes) {
    return fault(
        KindOr(*file, absl::StrCat("expected a safetensors file, but the header would have ", length,
                                   " bytes (at most ", kMaxHeaderBytes, "): the file is damaged or of another kind")));
  }
  if (length > file->size() - 8) {
    return fault(KindOr(
        *file, absl::StrCat("the header has ", length, " bytes, the file only ", file->size(), ": it is cut short")));
  }
  std::string text(length, '\0');
  RETURN_IF_ERROR(file->Read(8, text.data(), length));
  absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(text, file->size() - 8 - length);
  if (!header.ok()) return Annotate(header.status(), path);
  return std::unique_ptr<SafetensorsFile>(new SafetensorsFile(std::move(file), *std::move(header), 8 + length));
}

SafetensorsFile::SafetensorsFile(std::unique_ptr<InputFile> file, SafetensorsHeader header, uint64_t data_begin)
    : file_(std::move(file)), header_(std::move(header)), data_begin_(data_begin) {
  for (size_t i = 0; i < header_.tensors.size(); ++i) index_[header_.tensors[i].name] = i;
}

const SafetensorsTensor* SafetensorsFile::Find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &header_.tensors[found->second];
}

absl::Status SafetensorsFile::ReadFloats(const SafetensorsTensor& tensor, uint64_t first,
                                         absl::Span<float> values) const {
  const std::optional<FloatFormat> format = FloatFormatOf(tensor.dtype);
  if (!format.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(file_->path(), ": tensor \"", tensor.name, "\" has dtype ",
                                                   tensor.dtype, ", expected F32, F16 or BF16"));
  }
  if (first > tensor.elements || values.size() > tensor.elements - first) {
    return absl::OutOfRangeError(absl::StrCat(file_->path(), ": tensor \"", tensor.name, "\" has ", tensor.elements,
                                              " elements, asked for ", values.size(), " from ", first));
  }
  const size_t width = BytesOf(*format);
  uint64_t at = data_begin_ + tensor.begin + first * width;
  if (*format == FloatFormat::kF32) return file_->Read(at, values.data(), values.size() * width);
  char buffer[16384];
  while (!values.empty()) {
    const size_t n = std::min(values.size(), sizeof(buffer) / width);
    RETURN_IF_ERROR(file_->Read(at, buffer, n * width));
    Widen(*format, buffer, values.subspan(0, n));
    values.remove_prefix(n);
    at += n * width;
  }
  return absl::OkStatus();
}

absl::StatusOr<SafetensorsPrefix> MakeSafetensorsPrefix(absl::Span<const SafetensorsEntry> tensors,
                                                        const std::map<std::string, std::string>& metadata) {
  constexpr uint64_t kMaxBytes = uint64_t{1} << 62;
  SafetensorsPrefix prefix;
  absl::flat_hash_set<std::string> names = {kMetadata};
  std::string text = "{";
  if (!metadata.empty()) absl::StrAppend(&text, "\"", kMetadata, "\":", json(metadata).dump());
  uint64_t end = 0;
  for (const SafetensorsEntry& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      return absl::InvalidArgumentError(absl::StrCat("safetensors: the name \"", tensor.name, "\" is taken"));
    }
    uint64_t bytes = BytesOf(tensor.format);
    for (const uint64_t dimension : tensor.shape) {
      if (__builtin_mul_overflow(bytes, dimension, &bytes) || bytes > kMaxBytes) {
        return absl::InvalidArgumentError(absl::StrCat("safetensors: tensor \"", tensor.name, "\" of shape ",
                                                       ShapeString(tensor.shape), " has more than 2^62 bytes"));
      }
    }
    prefix.offsets.push_back(end);
    absl::StrAppend(&text, text.size() > 1 ? "," : "", json(tensor.name).dump(), ":{\"dtype\":\"",
                    DtypeOf(tensor.format), "\",\"shape\":[", absl::StrJoin(tensor.shape, ","), "],\"data_offsets\":[",
                    end, ",", end + bytes, "]}");
    end += bytes;
    if (end > kMaxBytes) return absl::InvalidArgumentError("safetensors: more than 2^62 bytes in one file");
  }
  text += "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  prefix.bytes.assign(reinterpret_cast<const char*>(&length), sizeof(length));
  prefix.bytes += text;
  for (uint64_t& offset : prefix.offsets) offset += prefix.bytes.size();
  prefix.file_bytes = prefix.bytes.size() + end;
  return prefix;
}

}  // namespace sluice
