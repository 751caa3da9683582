#include "scheduler/daemon.h"

int main(int argc, char** argv) { return sluice::SchedulerMain(argc, argv); }
