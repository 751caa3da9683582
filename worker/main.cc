#include "worker/daemon.h"

int main(int argc, char** argv) { return sluice::WorkerMain(argc, argv); }
