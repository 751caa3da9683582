// RETURN_IF_ERROR(status_expr);  ASSIGN_OR_RETURN(auto x, statusor_expr);
//
// The expression is evaluated once. The error is passed on unchanged; add context where the caller knows more than the
// callee: `return Annotate(status, "reading shard 3 of checkpoint t1-v40")`.
#ifndef SLUICE_COMMON_STATUS_MACROS_H_
#define SLUICE_COMMON_STATUS_MACROS_H_

#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace sluice {

// The same code, the message "<context>: <message>".
inline absl::Status Annotate(const absl::Status& status, std::string_view context) {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(absl::string_view(context.data(), context.size()), ": ", status.message()));
}

}  // namespace sluice

#define SLUICE_CONCAT_INNER(a, b) a##b
#define SLUICE_CONCAT(a, b) SLUICE_CONCAT_INNER(a, b)

#define RETURN_IF_ERROR(expr)                        \
  do {                                               \
    absl::Status sluice_status_ = (expr);            \
    if (!sluice_status_.ok()) return sluice_status_; \
  } while (false)

#define ASSIGN_OR_RETURN(lhs, expr) ASSIGN_OR_RETURN_IMPL(SLUICE_CONCAT(sluice_statusor_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_IMPL(var, lhs, expr) \
  auto var = (expr);                          \
  if (!var.ok()) return var.status();         \
  lhs = *std::move(var)

#endif  // SLUICE_COMMON_STATUS_MACROS_H_
