// All of Sluice in one program, for container images: what it is, the name says that it is called by (links to it are
// called sluice, sluice-scheduler, sluice-server, sluice-worker).
#include <cstdio>
#include <string>

#include "client/client_main.h"
#include "scheduler/daemon.h"
#include "server/daemon.h"
#include "worker/daemon.h"

int main(int argc, char** argv) {
  std::string name = argc > 0 ? argv[0] : "";
  name.erase(0, name.rfind('/') + 1);
  if (name == "sluice") return sluice::ClientMain(argc, argv);
  if (name == "sluice-scheduler") return sluice::SchedulerMain(argc, argv);
  if (name == "sluice-server") return sluice::ServerMain(argc, argv);
  if (name == "sluice-worker") return sluice::WorkerMain(argc, argv);
  std::fprintf(stderr, "%s: expected to be called as sluice, sluice-scheduler, sluice-server or sluice-worker\n",
               name.c_str());
  return 2;
}
