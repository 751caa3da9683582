// The `sluice` program: the command line of Sluice.
#ifndef SLUICE_CLIENT_CLIENT_MAIN_H_
#define SLUICE_CLIENT_CLIENT_MAIN_H_

namespace sluice {

// Returns the exit code.
int ClientMain(int argc, char** argv);

}  // namespace sluice

#endif  // SLUICE_CLIENT_CLIENT_MAIN_H_
