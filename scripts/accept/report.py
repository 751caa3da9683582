"""Rows of an acceptance run: what, target, measured, verdict."""
import json
import time


class Report:
    def __init__(self, quick):
        self.quick, self.rows, self.started = quick, [], time.time()

    def add(self, what, target, measured, verdict):
        """verdict: "ok", "SHORT", "NOISY", "SKIPPED", or "" for a number without a target."""
        self.rows.append({"what": what, "target": target, "measured": measured, "verdict": verdict})
        print("%-8s %s | target %s | measured %s" % (verdict or "-", what, target or "none", measured), flush=True)

    def check(self, what, target, measured, good):
        self.add(what, target, measured, "ok" if good else "SHORT")

    def at_most(self, what, limit, value, form="%.4g"):
        """A wrong result: no slack in --quick either. NaN is SHORT."""
        self.check(what, "<= " + form % limit, form % value, value <= limit)

    def at_least(self, what, limit, value, form="%.4g"):
        self.check(what, ">= " + form % limit, form % value, value >= limit)

    def fast(self, what, limit, value, form="%.2f", noisy=False, most=False):
        """A speed, at least `limit` (a cost: at most): 0.7 of it will do in --quick. A noisy one is neither ok nor SHORT."""
        slack = 0.7 if self.quick else 1
        good = value <= limit / slack if most else value >= limit * slack
        self.add(what, (">= ", "<= ")[most] + form % limit, form % value, "NOISY" if noisy else "ok" if good else "SHORT")

    def shown(self, what, measured):
        self.add(what, "", measured, "")

    def skipped(self, what, why):
        self.add(what, "", why, "SKIPPED")

    def finish(self, json_file):
        width = max(len(r["what"]) for r in self.rows) if self.rows else 0
        print("\n%-*s  %-28s %-40s %s" % (width, "what", "target", "measured", "verdict"))
        for r in self.rows:
            print("%-*s  %-28s %-40s %s" % (width, r["what"], r["target"], r["measured"], r["verdict"]))
        short = [r for r in self.rows if r["verdict"] == "SHORT"]
        print("\n%d numbers, %d short, %.0f s" % (len(self.rows), len(short), time.time() - self.started))
        if json_file:
            with open(json_file, "w") as f:
                json.dump(self.rows, f, indent=1)
        return 1 if short else 0
