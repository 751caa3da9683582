// Files of the wrong kind under the right name: what a failed download or a forgotten `git lfs pull` leaves behind.
#ifndef SLUICE_COMMON_FILE_KIND_H_
#define SLUICE_COMMON_FILE_KIND_H_

#include <string>
#include <string_view>

namespace sluice {

// By a file's first bytes (a few hundred suffice): what it is and what to do, as the end of a sentence, where it is a
// Git LFS pointer, an HTML or XML page, an archive, a pickle or a GGUF file; "" where none of these is recognized. To
// be asked once the file is known not to be what was expected.
std::string ForeignKind(std::string_view first_bytes);

}  // namespace sluice

#endif  // SLUICE_COMMON_FILE_KIND_H_
