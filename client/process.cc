#include "client/process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <deque>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace sluice {
namespace {

// Runs in the child between fork and exec: only calls that are safe there.
[[noreturn]] void BecomeProgram(char* const* argv, int log, int null, int report, pid_t parent) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // it died before the line above
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  for (int s = 1; s < NSIG; ++s) sigaction(s, &action, nullptr);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  dup2(null, 0);
  dup2(log, 1);
  dup2(log, 2);
  execv(argv[0], argv);
  const int error = errno;
  // The parent reads it: an exec that worked closes the pipe silently.
  while (write(report, &error, sizeof(error)) < 0 && errno == EINTR) {
  }
  _exit(127);
}

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

}  // namespace

absl::StatusOr<ChildProcess> ChildProcess::Start(const std::string& program, const std::vector<std::string>& args,
                                                 const std::string& log_path) {
  const auto fail = [&](const std::string& what, int error) {
    return absl::InternalError(absl::StrCat("starting ", program, ": ", what, ": ", strerror(error)));
  };
  Descriptor log{open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644)};
  if (log.fd < 0) return fail(log_path, errno);
  Descriptor null{open("/dev/null", O_RDONLY | O_CLOEXEC)};
  if (null.fd < 0) return fail("/dev/null", errno);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return fail("pipe", errno);
  Descriptor read_end{ends[0]};
  std::vector<char*> argv;
  argv.push_back(const_cast<char*>(program.c_str()));
  for (const std::string& arg : args) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);
  const pid_t parent = getpid();

  ChildProcess child;
  {
    Descriptor write_end{ends[1]};
    child.pid_ = fork();
    if (child.pid_ == 0) BecomeProgram(argv.data(), log.fd, null.fd, write_end.fd, parent);
    if (child.pid_ < 0) return fail("fork", errno);
  }
  int error = 0;
  ssize_t got;
  while ((got = read(read_end.fd, &error, sizeof(error))) < 0 && errno == EINTR) {
  }
  if (got == sizeof(error)) return fail("exec", error);
  // By number: the C library's header lacks extern "C". Closed on exec by itself.
  child.descriptor_ = static_cast<int>(syscall(SYS_pidfd_open, child.pid_, 0));
  if (child.descriptor_ < 0) return fail("pidfd_open", errno);
  return child;
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept { *this = std::move(other); }

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

ChildProcess::~ChildProcess() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  if (descriptor_ >= 0) close(descriptor_);
}

void ChildProcess::Signal(int signal) const {
  if (pid_ > 0) kill(pid_, signal);
}

std::string ChildProcess::Reap() {
  int status = 0;
  if (pid_ <= 0 || waitpid(pid_, &status, WNOHANG) != pid_) return "";
  pid_ = -1;
  close(descriptor_);
  descriptor_ = -1;
  if (WIFSIGNALED(status)) return absl::StrCat("signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")");
  return absl::StrCat("exit code ", WEXITSTATUS(status));
}

std::string LastLines(const std::string& path, int lines) {
  std::ifstream in(path);
  std::deque<std::string> last;
  for (std::string line; std::getline(in, line);) {
    last.push_back("    " + line);
    if (last.size() > static_cast<size_t>(lines)) last.pop_front();
  }
  return absl::StrJoin(last, "\n");
}

}  // namespace sluice
