// The accepting end of PeerService.Mail: streams that other ranks opened to send messages to this one.
#ifndef SLUICE_WORKER_MAIL_STREAM_H_
#define SLUICE_WORKER_MAIL_STREAM_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "common/transport.h"
#include "worker/peer_mail.h"

namespace sluice {

// The mail of the job of this id that the node works for or is about to; null: none.
using FindMail = std::function<std::shared_ptr<PeerMail>(const std::string& job_id)>;

// What `find` needs outlives the listener.
Acceptor MakeMailAcceptor(FindMail find);

// Says why, and closes the stream with it. `generation`: the present one.
void RefuseMail(ByteStream* stream, const absl::Status& status, uint64_t generation);

}  // namespace sluice

#endif  // SLUICE_WORKER_MAIL_STREAM_H_
