// A server over a small model of random weights.
#pragma once

#include <utility>

#include "engine/engine.hpp"
#include "http_setup.hpp"
#include "model/load.hpp"
#include "model_says.hpp"
#include "scoring_engine.hpp"

namespace test {

/// A server over random weights. What the engine refers to stands before it.
struct ModelSite {
  chunkattn::ThreadPool pool{1};
  serve::Model model =
      serve::random_model(ScoringEngine::shape(300), serve::Element::fp32, 7, pool);
  serve::Products products{pool, serve::ProductKind::own};
  Site site;

  explicit ModelSite(serve::HttpOptions http = {}, const serve::EngineOptions& engine = options(),
                     serve::ServiceOptions service = {})
      : site(serve::make_engine(model, products, engine), std::move(http), std::move(service)) {}

  static serve::EngineOptions options() { return ScoringEngine::options(); }
};

}  // namespace test
