// Makes ThreadSanitizer see absl's locks. Debian's Abseil is built without it, so that every access under an
// absl::Mutex would look like a race. Linked into the programs of the `tsan` preset with -Wl,--wrap
// (wrapped_symbols.txt beside this file): our calls into the library go through here and are announced; the library
// itself is as it is.
//
// Between a pre_ and a post_ call ThreadSanitizer looks away, also from the conditions of other threads that
// absl::Mutex evaluates there.
#include <sanitizer/tsan_interface.h>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

// The symbol of a library function before and after --wrap.
#define REAL(symbol) __real_##symbol
#define WRAP(symbol) __wrap_##symbol
#define LOCK _ZN4absl7debian35Mutex4LockEv
#define UNLOCK _ZN4absl7debian35Mutex6UnlockEv
#define MUTEX_END _ZN4absl7debian35MutexD1Ev
#define AWAIT _ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE
#define AWAIT_TIMEOUT _ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE
#define AWAIT_DEADLINE _ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE
#define CV_WAIT _ZN4absl7debian37CondVar4WaitEPNS0_5MutexE
#define CV_WAIT_TIMEOUT _ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE
#define CV_WAIT_DEADLINE _ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE
#define NOTIFY _ZN4absl7debian312Notification6NotifyEv
#define NOTIFICATION_WAIT _ZNK4absl7debian312Notification19WaitForNotificationEv
#define NOTIFICATION_WAIT_TIMEOUT _ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE
#define COUNTER_DECREMENT _ZN4absl7debian315BlockingCounter14DecrementCountEv
#define COUNTER_WAIT _ZN4absl7debian315BlockingCounter4WaitEv
#define WRAPPED(result, symbol, ...)           \
  extern "C" result REAL(symbol)(__VA_ARGS__); \
  extern "C" result WRAP(symbol)(__VA_ARGS__)
// A second round, so that the names above are replaced before ## joins them.
#define FUNCTION(result, symbol, ...) WRAPPED(result, symbol, __VA_ARGS__)
#define CALL_(symbol, ...) REAL(symbol)(__VA_ARGS__)
#define CALL(symbol, ...) CALL_(symbol, __VA_ARGS__)

namespace {

// The lock is given up inside the call and taken again.
class Waiting {
 public:
  explicit Waiting(absl::Mutex* mutex) : mutex_(mutex) {
    __tsan_mutex_pre_unlock(mutex_, 0);
    __tsan_mutex_post_unlock(mutex_, 0);
    __tsan_mutex_pre_lock(mutex_, 0);
  }
  ~Waiting() { __tsan_mutex_post_lock(mutex_, 0, 0); }

 private:
  absl::Mutex* const mutex_;
};

}  // namespace

FUNCTION(void, LOCK, absl::Mutex* mutex) {
  // What its owners released so far counts before the mutex itself is looked at: an object that came here through gRPC,
  // whose own hand-over is not seen, was made before its maker last unlocked.
  __tsan_acquire(mutex);
  __tsan_mutex_pre_lock(mutex, 0);
  CALL(LOCK, mutex);
  __tsan_mutex_post_lock(mutex, 0, 0);
}
FUNCTION(void, UNLOCK, absl::Mutex* mutex) {
  __tsan_mutex_pre_unlock(mutex, 0);
  CALL(UNLOCK, mutex);
  __tsan_mutex_post_unlock(mutex, 0);
}
FUNCTION(void, MUTEX_END, absl::Mutex* mutex) {
  CALL(MUTEX_END, mutex);
  __tsan_mutex_destroy(mutex, 0);
}
FUNCTION(void, AWAIT, absl::Mutex* mutex, const absl::Condition& condition) {
  Waiting waiting(mutex);
  CALL(AWAIT, mutex, condition);
}
FUNCTION(bool, AWAIT_TIMEOUT, absl::Mutex* mutex, const absl::Condition& condition, absl::Duration timeout) {
  Waiting waiting(mutex);
  return CALL(AWAIT_TIMEOUT, mutex, condition, timeout);
}
FUNCTION(bool, AWAIT_DEADLINE, absl::Mutex* mutex, const absl::Condition& condition, absl::Time deadline) {
  Waiting waiting(mutex);
  return CALL(AWAIT_DEADLINE, mutex, condition, deadline);
}
FUNCTION(void, CV_WAIT, absl::CondVar* cv, absl::Mutex* mutex) {
  Waiting waiting(mutex);
  CALL(CV_WAIT, cv, mutex);
}
FUNCTION(bool, CV_WAIT_TIMEOUT, absl::CondVar* cv, absl::Mutex* mutex, absl::Duration timeout) {
  Waiting waiting(mutex);
  return CALL(CV_WAIT_TIMEOUT, cv, mutex, timeout);
}
FUNCTION(bool, CV_WAIT_DEADLINE, absl::CondVar* cv, absl::Mutex* mutex, absl::Time deadline) {
  Waiting waiting(mutex);
  return CALL(CV_WAIT_DEADLINE, cv, mutex, deadline);
}
FUNCTION(void, NOTIFY, absl::Notification* notification) {
  __tsan_release(notification);
  CALL(NOTIFY, notification);
}
FUNCTION(void, NOTIFICATION_WAIT, const absl::Notification* notification) {
  CALL(NOTIFICATION_WAIT, notification);
  __tsan_acquire(const_cast<absl::Notification*>(notification));
}
FUNCTION(bool, NOTIFICATION_WAIT_TIMEOUT, const absl::Notification* notification, absl::Duration timeout) {
  const bool notified = CALL(NOTIFICATION_WAIT_TIMEOUT, notification, timeout);
  if (notified) __tsan_acquire(const_cast<absl::Notification*>(notification));
  return notified;
}
FUNCTION(bool, COUNTER_DECREMENT, absl::BlockingCounter* counter) {
  __tsan_release(counter);
  return CALL(COUNTER_DECREMENT, counter);
}
FUNCTION(void, COUNTER_WAIT, absl::BlockingCounter* counter) {
  CALL(COUNTER_WAIT, counter);
  __tsan_acquire(counter);
}
