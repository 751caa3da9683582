#include "common/file_kind.h"

#include "absl/strings/match.h"

namespace sluice {

std::string ForeignKind(std::string_view first_bytes) {
  const auto begins = [](std::string_view text, std::string_view with) { return text.substr(0, with.size()) == with; };
  if (begins(first_bytes, "version https://git-lfs.github.com/spec/")) {
    return "it is a Git LFS pointer, a few lines in place of the file; fetch the file itself with `git lfs pull`";
  }
  std::string_view text = first_bytes;
  if (begins(text, "\xef\xbb\xbf")) text.remove_prefix(3);
  while (!text.empty() && (text[0] == ' ' || text[0] == '\t' || text[0] == '\r' || text[0] == '\n'))
    text.remove_prefix(1);
  for (const char* tag : {"<!doctype", "<html", "<head", "<body", "<?xml", "<!--"}) {
    if (absl::StartsWithIgnoreCase(absl::string_view(text.data(), text.size()), tag)) {
      return "it is an HTML or XML page, as a failed download leaves behind; fetch the file again";
    }
  }
  using namespace std::string_view_literals;
  if (begins(first_bytes, "PK\x03\x04")) {
    return "it is a zip archive (PyTorch's .bin and .pt files are such); save the model as safetensors";
  }
  if (begins(first_bytes, "\x1f\x8b")) return "it is compressed with gzip; unpack it";
  if (begins(first_bytes, "GGUF")) return "it is a GGUF file; use the model's safetensors files";
  if (begins(first_bytes, "\x80\x02"sv) || begins(first_bytes, "\x80\x04"sv)) {
    return "it is a Python pickle (an old PyTorch file); save the model as safetensors";
  }
  return "";
}

}  // namespace sluice
