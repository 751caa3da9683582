#include "client/client_main.h"

int main(int argc, char** argv) { return sluice::ClientMain(argc, argv); }
