#include "server/daemon.h"

int main(int argc, char** argv) { return sluice::ServerMain(argc, argv); }
