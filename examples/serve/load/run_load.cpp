#include "run_load.hpp"

#include <algorithm>
#include <cmath>

namespace serve {

namespace {

struct Served {
  double first = 0, last = 0;  ///< when its tokens came
  std::size_t tokens = 0;
  bool completed = false;
};

std::size_t collect(Engine& engine, double now, std::vector<Served>& served) {
  std::size_t ended = 0;
  for (const Event& event : engine.take_events()) {
    Served& one = served[static_cast<std::size_t>(event.id)];
    if (event.token >= 0) {
      if (one.tokens++ == 0) one.first = now;
      one.last = now;
    }
    if (event.finish == Finish::none) continue;
    ++ended;
    one.completed = event.finish == Finish::stop || event.finish == Finish::length;
  }
  return ended;
}

void summarise(std::span<const Arrival> arrivals, const std::vector<Served>& served,
               LoadReport& report) {
  std::vector<double> ttft, tpot;
  double latency = 0;
  std::size_t counted = 0;
  for (std::size_t i = 0; i < served.size(); ++i) {
    const Served& one = served[i];
    report.tokens += one.tokens;
    if (!one.completed) continue;
    ++report.completed;
    if (one.tokens == 0) continue;
    ++counted;
    latency += (one.last - arrivals[i].time) / static_cast<double>(one.tokens);
    ttft.push_back(one.first - arrivals[i].time);
    if (one.tokens > 1)
      tpot.push_back((one.last - one.first) / static_cast<double>(one.tokens - 1));
  }
  if (counted > 0) report.normalised_latency = latency / static_cast<double>(counted);
  report.ttft = percentiles(std::move(ttft));
  report.tpot = percentiles(std::move(tpot));
}

}  // namespace

Percentiles percentiles(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto rank = [&](double share) {
    const auto n = static_cast<std::size_t>(std::ceil(share * static_cast<double>(values.size())));
    return values[std::max<std::size_t>(n, 1) - 1];
  };
  return {rank(0.5), rank(0.9), rank(0.99)};
}

LoadReport run_load(Engine& engine, std::span<const Arrival> arrivals, const LoadOptions& options) {
  LoadReport report;
  std::vector<Served> served(arrivals.size());
  const double start = options.clock();
  double skipped = 0;
  std::size_t ended = 0;
  for (;;) {
    const double spent = options.clock() - start;
    report.capped = spent > options.max_seconds;
    if (report.capped) break;
    const double now = spent + skipped;
    while (report.arrived < arrivals.size() && arrivals[report.arrived].time <= now)
      engine.submit(arrivals[report.arrived++].request);
    if (!engine.step(now)) {
      if (report.arrived == arrivals.size()) break;
      skipped += std::max(arrivals[report.arrived].time - now, 0.0);
      continue;
    }
    report.busy_seconds = options.clock() - start;
    report.seconds = report.busy_seconds + skipped;
    ended += collect(engine, report.seconds, served);
    if (options.progress) options.progress(report.seconds, report.arrived, ended);
  }
  for (std::size_t i = 0; i < report.arrived; ++i) engine.cancel(arrivals[i].request.id);
  collect(engine, report.seconds, served);
  summarise(arrivals, served, report);
  return report;
}

}  // namespace serve
