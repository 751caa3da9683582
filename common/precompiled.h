// Headers that most sources include, parsed once a build. Not to be included by anything: CMake does. None that changes
// often is here: a change rebuilds everything.
#ifndef SLUICE_COMMON_PRECOMPILED_H_
#define SLUICE_COMMON_PRECOMPILED_H_

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/log.h"

#endif  // SLUICE_COMMON_PRECOMPILED_H_
