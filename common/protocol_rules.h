// Rules of the protocol (docs/protocol.md) that a test may switch off to show what they are for. All hold in
// production.
#ifndef SLUICE_COMMON_PROTOCOL_RULES_H_
#define SLUICE_COMMON_PROTOCOL_RULES_H_

namespace sluice {

struct ProtocolRules {
  bool fencing = true;          // messages of another generation are refused
  bool dedup = true;            // a second copy of a contribution, or one of a committed round, is dropped
  bool kept_version = true;     // a copy keeps the value at v-1
  bool persist_first = true;    // generation and plan are on disk before anybody hears of them
  bool verdict_carried = true;  // the verdict of the open round goes: fence report -> plan -> all shards
  // However full --hold_memory is, a server takes (server/hold_book.h)
  bool take_pairs = true;   // what completes a pair in the sum tree
  bool take_oldest = true;  // what belongs to the chunk that has held something for the longest
};

}  // namespace sluice

#endif  // SLUICE_COMMON_PROTOCOL_RULES_H_
