// common/precompiled.h for tests.
#ifndef SLUICE_TESTS_PRECOMPILED_H_
#define SLUICE_TESTS_PRECOMPILED_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/precompiled.h"

#endif  // SLUICE_TESTS_PRECOMPILED_H_
