#include "client/client_main.h"

#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <thread>

#include "client/commands.h"
#include "common/log.h"
#include "common/rpc.h"

namespace sluice {

int ClientMain(int argc, char** argv) {
  TuneMalloc();
  InitLog("sluice", "warn");

  // Signals become Interrupt::Notify on a thread of their own: blocked here, before any other thread exists.
  signal(SIGPIPE, SIG_IGN);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  struct sigaction hangup;
  const bool nohup = sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler == SIG_IGN;
  if (!nohup) sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  static Interrupt& interrupt = *new Interrupt();  // outlives the thread
  std::thread([signals] {
    for (int signal = 0; sigwait(&signals, &signal) == 0;) interrupt.Notify();
  }).detach();

  ClientEnvironment environment;
  environment.out = &std::cout;
  environment.err = &std::cerr;
  environment.out_is_terminal = isatty(STDOUT_FILENO) == 1;
  winsize size;
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) environment.columns = size.ws_col;
  environment.getenv = [](const std::string& name) {
    const char* value = std::getenv(name.c_str());
    return std::string(value != nullptr ? value : "");
  };
  if (argc > 0) environment.program = argv[0];
  std::error_code error;
  environment.program_folder = std::filesystem::read_symlink("/proc/self/exe", error).parent_path().string();
  environment.interrupt = &interrupt;
  const int code = RunClient(std::vector<std::string>(argv + 1, argv + argc), environment);
  std::cout.flush();
  return code;
}

}  // namespace sluice
