#include "common/safetensors.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"
#include "nlohmann/json.hpp"

namespace sluice {
namespace {

using nlohmann::json;

constexpr char kMetadata[] = "__metadata__";

// 0: unknown.
uint64_t DtypeBytes(const std::string& dtype) {
  static constexpr std::pair<std::string_view, uint64_t> kSizes[] = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
      {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
      {"F32", 4},  {"I64", 8}, {"U64", 8}, {"F64", 8},     {"C64", 8}};
  for (const auto& [name, bytes] : kSizes) {
    if (dtype == name) return bytes;
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
  const uint64_t width = DtypeBytes(tensor.dtype);
  if (width == 0) return fault("unknown dtype \"", tensor.dtype, "\"");
  if (tensor.end < tensor.begin) {
    return fault("data_offsets [", tensor.begin, ", ", tensor.end, "] end before they begin");
  }
  uint64_t bytes = width;
  for (const uint64_t dimension : tensor.shape) {
    if (__builtin_mul_overflow(bytes, dimension, &bytes)) {
      return fault("shape ", ShapeString(tensor.shape), " has more than 2^64 bytes");
    }
  }
  if (tensor.end - tensor.begin != bytes) {
    return fault("data_offsets [", tensor.begin, ", ", tensor.end, "] hold ", tensor.end - tensor.begin, " bytes, but ",
                 tensor.dtype, " ", ShapeString(tensor.shape), " needs ", bytes);
  }
  tensor.elements = bytes / width;
  return absl::OkStatus();
}

}  // namespace

std::string ShapeString(absl::Span<const uint64_t> shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view text, uint64_t data_bytes) {
  HeaderReader reader;
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
    return fault("expected a safetensors file, found ", file->size(), " bytes (the header's length alone has 8)");
  }
  uint64_t length = 0;
  RETURN_IF_ERROR(file->Read(0, &length, 8));
  if (length > kMaxHeaderBytes) {
    return fault("expected a safetensors file, but the header would have ", length, " bytes (at most ", kMaxHeaderBytes,
                 "): the file is damaged or of another kind");
  }
  if (length > file->size() - 8) {
    return fault("the header has ", length, " bytes, the file only ", file->size(), ": it is cut short");
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
  if (tensor.dtype != "F32") {
    return absl::InvalidArgumentError(
        absl::StrCat(file_->path(), ": tensor \"", tensor.name, "\" has dtype ", tensor.dtype, ", expected F32"));
  }
  if (first > tensor.elements || values.size() > tensor.elements - first) {
    return absl::OutOfRangeError(absl::StrCat(file_->path(), ": tensor \"", tensor.name, "\" has ", tensor.elements,
                                              " elements, asked for ", values.size(), " from ", first));
  }
  return file_->Read(data_begin_ + tensor.begin + first * sizeof(float), values.data(), values.size() * sizeof(float));
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
    uint64_t bytes = sizeof(float);
    for (const uint64_t dimension : tensor.shape) {
      if (__builtin_mul_overflow(bytes, dimension, &bytes) || bytes > kMaxBytes) {
        return absl::InvalidArgumentError(absl::StrCat("safetensors: tensor \"", tensor.name, "\" of shape ",
                                                       ShapeString(tensor.shape), " has more than 2^62 bytes"));
      }
    }
    prefix.offsets.push_back(end);
    absl::StrAppend(&text, text.size() > 1 ? "," : "", json(tensor.name).dump(), ":{\"dtype\":\"F32\",\"shape\":[",
                    absl::StrJoin(tensor.shape, ","), "],\"data_offsets\":[", end, ",", end + bytes, "]}");
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
