#include "http_server.hpp"

#include <fmt/format.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <chunkattn/version.hpp>
#include <memory>
#include <random>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>

#include "answer.hpp"
#include "api_error.hpp"
#include "connection_pool.hpp"
#include "framing.hpp"
#include "metrics.hpp"
#include "page.hpp"
#include "score_answer.hpp"
#include "tree_json.hpp"

namespace serve {

namespace {

constexpr const char* json_type = "application/json";
const std::string version = fmt::format("{}.{}.{}", CHUNKATTN_VERSION_MAJOR,
                                        CHUNKATTN_VERSION_MINOR, CHUNKATTN_VERSION_PATCH);
constexpr const char* allow_origin_header = "Access-Control-Allow-Origin";

long long seconds_since_1970() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::seconds>(now).count();
}

/// Compares in a time that depends on the lengths alone.
bool equal_in_constant_time(std::string_view a, std::string_view b) {
  unsigned difference = a.size() != b.size();
  for (std::size_t i = 0; i < a.size(); ++i)
    difference |= static_cast<unsigned>(a[i] ^ (b.empty() ? '\0' : b[i % b.size()]));
  return difference == 0;
}

/// Without a port after it.
std::string host_alone(const std::string& host) {
  const std::size_t colon = host.rfind(':');
  const bool port = colon != std::string::npos && host.find(']', colon) == std::string::npos;
  return host.substr(0, port ? colon : std::string::npos);
}

bool is_loopback(const std::string& host) {
  return host == "127.0.0.1" || host == "localhost" || host == "::1" || host == "[::1]";
}

int status_of(Refused::Reason reason) {
  switch (reason) {
    case Refused::Reason::full:
      return 429;
    case Refused::Reason::late:
    case Refused::Reason::closing:
    case Refused::Reason::failed:
      return 503;
    case Refused::Reason::invalid:
      return 400;
    default:
      return 500;
  }
}

void set_error(httplib::Response& response, const ApiError& error) {
  response.status = error.status();
  response.set_content(error.body(), json_type);
  if (error.status() == 429 || error.status() == 503) response.set_header("Retry-After", "1");
  if (error.status() == 401) response.set_header("WWW-Authenticate", "Bearer");
}

/// As above, and closes the connection: what follows on it is not known to be a request. In httplib
/// that is a body whose provider has written all and then fails.
void set_last_error(httplib::Response& response, const ApiError& error) {
  set_error(response, error);
  const std::string body = std::exchange(response.body, {});
  response.headers.erase("Content-Type");
  response.set_header("Connection", "close");
  response.set_content_provider(body.size(), json_type,
                                [body](std::size_t, std::size_t, httplib::DataSink& sink) {
                                  sink.write(body.data(), body.size());
                                  return false;
                                });
}

/// A reply that an answer writes bit by bit; what `guard` guards ends with it.
template <class SomeAnswer>
void set_provider(const httplib::Request& request, httplib::Response& response, const char* type,
                  const std::shared_ptr<SomeAnswer>& answer, const std::shared_ptr<void>& guard) {
  // One that speaks HTTP/1.0 knows no chunks: the end of the connection is the end of the body.
  const bool chunked = request.version != "HTTP/1.0";
  const auto provider = [answer, guard, chunked](std::size_t, httplib::DataSink& sink) {
    return answer->go_on(sink) && (chunked || !answer->ended());
  };
  response.status = 200;
  response.set_header("Cache-Control", "no-store");
  if (chunked)
    response.set_chunked_content_provider(type, provider);
  else
    response.set_content_provider(type, provider);
}

/// Paths, and the methods that they know.
struct Route {
  std::string_view path, method;
};
constexpr Route routes[] = {{"/", "GET"},
                            {"/health", "GET"},
                            {"/ping", "GET"},
                            {"/version", "GET"},
                            {"/tokenize", "POST"},
                            {"/metrics", "GET"},
                            {"/tree", "GET"},
                            {"/kv_chunks", "GET"},
                            {"/model_info", "GET"},
                            {"/get_model_info", "GET"},
                            {"/v1/loads", "GET"},
                            {"/v1/models", "GET"},
                            {"/v1/score", "POST"},
                            {"/v1/completions", "POST"},
                            {"/v1/chat/completions", "POST"}};
constexpr std::string_view models_prefix = "/v1/models/";

/// A slash at its end says nothing.
std::string path_of(const httplib::Request& request) {
  const std::string& path = request.path;
  return path.size() > 1 && path.back() == '/' ? path.substr(0, path.size() - 1) : path;
}

/// The one that a path knows, beside HEAD for GET. \throws ApiError with 404
std::string_view method_of(const std::string& path) {
  const auto* const route = std::find_if(std::begin(routes), std::end(routes),
                                         [&](const Route& r) { return r.path == path; });
  const bool one_model = path.starts_with(models_prefix);
  for (const std::string_view missing : {"/v1/embeddings", "/v1/responses"})
    if (path.starts_with(missing))
      throw ApiError(404, fmt::format("{}: not supported: there are /v1/chat/completions and "
                                      "/v1/completions",
                                      missing));
  if (route == std::end(routes) && !one_model)
    throw ApiError(404,
                   "no such path; there are / /health /ping /version /metrics /model_info /tree "
                   "/tokenize /v1/loads /v1/models /v1/score /v1/completions /v1/chat/completions");
  return one_model ? "GET" : route->method;
}

/// Other upgrades are an offer, which is passed over; this one is all that its client understands.
bool asks_for_websocket(const httplib::Request& request) {
  return lowered(request.get_header_value("Upgrade")).find("websocket") != std::string::npos;
}

/// A body within the limit. What is beyond is read and dropped for a while, so that the client
/// hears of it before the connection is closed. False if there was more than that, or less than
/// promised.
bool read_body(const httplib::ContentReader& read, std::size_t most, std::string& body,
               std::size_t& size) {
  return read([&](const char* data, std::size_t bytes) {
    size += bytes;
    if (size <= most) body.append(data, bytes);
    return size <= 8 * most;
  });
}

}  // namespace

/// A reply that is there at once.
struct HttpServer::Reply {
  std::string body, type = json_type;
  int status = 200;
};

HttpServer::HttpServer(Service& service, const Served& served, HttpOptions options)
    : service_(service),
      served_(served),
      options_(std::move(options)),
      id_prefix_(fmt::format("{:08x}", std::random_device()())) {
  server_.new_task_queue = [this] { return new ConnectionPool(options_.max_connections); };
  // Not httplib's own options: with SO_REUSEPORT two servers share a port without knowing it.
  server_.set_socket_options([this](socket_t socket) {
    const int yes = 1;
    ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    listening_ = socket;
  });
  server_.set_tcp_nodelay(true);

  server_.set_pre_routing_handler(
      [this](const httplib::Request& request, httplib::Response& response) {
        return handle_before_body(request, response) ? httplib::Server::HandlerResponse::Handled
                                                     : httplib::Server::HandlerResponse::Unhandled;
      });
  const auto with_body = [this](const httplib::Request& request, httplib::Response& response,
                                const httplib::ContentReader& read) {
    std::string body;
    std::size_t size = 0;
    const bool whole = read_body(read, options_.max_body, body, size);
    if (size > options_.max_body)
      set_last_error(response, ApiError(413, fmt::format("the body has more than {} bytes",
                                                         options_.max_body)));
    else if (!whole)
      set_last_error(response, ApiError(400, "the body is not whole"));
    else
      handle(request, response, body);
  };
  server_.Post(".*", with_body);
  server_.Put(".*", with_body);
  server_.Patch(".*", with_body);
  // What httplib refuses by itself.
  server_.set_error_handler([](const httplib::Request&, httplib::Response& response) {
    if (response.body.empty() && !response.has_header("Content-Length") &&
        response.get_header_value("Connection") != "close")
      set_last_error(response, ApiError(response.status, "this is no request of HTTP/1.1"));
  });
  server_.set_exception_handler(
      [](const httplib::Request&, httplib::Response& response, std::exception_ptr) {
        set_last_error(response, ApiError(500, "an error that was not expected"));
      });
}

int HttpServer::bind() {
  // Each call of httplib's reads the error that it leaves in errno.
  const int port = options_.port == 0 ? server_.bind_to_any_port(options_.host)
                   : server_.bind_to_port(options_.host, options_.port) ? options_.port
                                                                        : -1;
  if (port < 0)
    throw std::runtime_error(
        fmt::format("{}:{}: cannot be bound: in use, or no address of this machine", options_.host,
                    options_.port));
  ::listen(listening_, 512);  // httplib's backlog is 5
  return port;
}

void HttpServer::run() {
  server_.listen_after_bind();
}

void HttpServer::stop(std::chrono::duration<double> limit) {
  const auto wait = [](auto until, std::chrono::duration<double> most) {
    const auto start = std::chrono::steady_clock::now();
    while (!until() && std::chrono::steady_clock::now() - start < most)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  };
  wait([this] { return generating_ == 0; }, limit);
  // httplib ignores a stop() before its loop runs.
  wait([this] { return server_.is_running(); }, std::chrono::seconds(10));
  server_.end_connections();
  server_.stop();
}

/// What can be said before a body is read. False if it is to be read, and handle() says the rest.
bool HttpServer::handle_before_body(const httplib::Request& request, httplib::Response& response) {
  const auto is_odd = [](unsigned char c) { return c <= ' ' || c >= 0x7f; };
  allow_origin(request, response);
  if (ConnectionPool::turning_away()) {
    set_last_error(response,
                   ApiError(429, fmt::format("all {} connections are taken: try again later",
                                             options_.max_connections)));
  } else if (const std::string error = framing_error(request); !error.empty()) {
    set_last_error(response, ApiError(400, error));
  } else if (asks_for_websocket(request)) {
    set_last_error(response, ApiError(400,
                                      "Upgrade: websocket: not supported; with stream = true a "
                                      "reply comes as server-sent events"));
  } else if (request.is_multipart_form_data()) {  // which httplib would read in its own way
    set_last_error(response, ApiError(415, fmt::format("Content-Type: expected {}", json_type)));
  } else if (request.path.size() > 256 ||
             std::any_of(request.path.begin(), request.path.end(), is_odd)) {
    // httplib's regular expressions need stack for each byte of it.
    set_last_error(response, ApiError(404, "no such path"));
  } else if (has_body(request.method)) {
    if (request.has_header("Transfer-Encoding")) Connection::current().expect_chunks();
    return false;
  } else {
    handle(request, response, "");
  }
  return true;
}

void HttpServer::handle(const httplib::Request& request, httplib::Response& response,
                        const std::string& body) {
  response.set_header("X-Content-Type-Options", "nosniff");
  try {
    if (!may_be_named(request.get_header_value("Host")))
      throw ApiError(403, "Host: expected localhost; with an API key any host will do");
    const std::string path = path_of(request);
    const std::string_view method = method_of(path);
    if (request.method == "OPTIONS" && response.has_header(allow_origin_header)) {
      response.status = 204;  // may a page of this origin ask? the key comes with what it asks
      return;
    }
    if (request.method != method && !(request.method == "HEAD" && method == "GET")) {
      response.set_header("Allow", std::string(method));
      throw ApiError(405, fmt::format("{}: expected {}", request.method, method));
    }
    if ((path.starts_with("/v1/") || method == "POST") && !has_key(request))
      throw ApiError(401, "Authorization: expected Bearer and the API key of this server", "",
                     "invalid_api_key");
    // A page of another site cannot send this type without asking first, and is never answered.
    if (method == "POST" && !is_json(request.get_header_value("Content-Type")))
      throw ApiError(415, fmt::format("Content-Type: expected {}", json_type));
    if (path == "/tokenize") {
      response.set_content(tokens_json(read_tokens(body, served_), served_.max_length), json_type);
      return;
    }
    if (path == "/v1/score") return score(request, response, body);
    if (method == "POST") {
      generate(request, response, body);
      return;
    }
    Reply reply = reply_to(request);
    response.status = reply.status;
    response.set_content(std::move(reply.body), reply.type.c_str());
  } catch (const ApiError& error) {
    set_error(response, error);
  } catch (const Refused& refused) {
    const ApiError error(status_of(refused.reason()), refused.what());
    set_error(response, error);
    if (refused.reason() == Refused::Reason::closing) response.set_header("Connection", "close");
  }
}

HttpServer::Reply HttpServer::reply_to(const httplib::Request& request) const {
  const std::string path = path_of(request);
  if (path == "/") return {page, "text/html; charset=utf-8"};
  if (path == "/metrics")
    return {metrics_text(service_.counters(), service_.snapshot(), !options_.hides_cached),
            "text/plain; version=0.0.4"};
  if (path == "/tree") return {tree(request)};
  if (path == "/kv_chunks") return {chunks(has_key(request))};
  if (path == "/v1/loads")
    return {loads_json(service_.counters(), service_.snapshot(), options_.max_requests,
                       !options_.hides_cached)};
  if (path == "/model_info" || path == "/get_model_info")
    return {nlohmann::json{{"model_path", served_.name},
                           {"served_model_name", served_.name},
                           {"is_generation", true},
                           {"max_model_len", served_.max_length}}
                .dump()};
  if (path == "/health" || path == "/ping") return health();
  if (path == "/version") return {nlohmann::json{{"version", version}}.dump()};
  const nlohmann::json model{{"id", served_.name},
                             {"object", "model"},
                             {"created", 0},
                             {"owned_by", "chunkattn"},
                             {"chats", served_.chat != nullptr},
                             {"processor", served_.processor},
                             {"max_model_len", served_.max_length}};
  if (path == "/v1/models")
    return {nlohmann::json{{"object", "list"}, {"data", nlohmann::json::array({model})}}.dump()};
  if (path != std::string(models_prefix) + served_.name)
    throw ApiError(404, "no such model; there is " + served_.name, "model", "model_not_found");
  return {model.dump()};
}

HttpServer::Reply HttpServer::health() const {
  const std::string failure = service_.failure();
  const char* state = !failure.empty() ? "failed" : service_.closing() ? "closing" : "ok";
  nlohmann::json body{{"status", state}};
  if (!failure.empty()) body["reason"] = failure;
  return {body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), json_type,
          state == std::string("ok") ? 200 : 503};
}

/// What is cached, for subscribers that check what events said.
std::string HttpServer::chunks(bool has_key) const {
  if (!options_.shows_chunks) throw ApiError(404, "no such path without --kv-events");
  if (!has_key)
    throw ApiError(401, "Authorization: expected Bearer and the API key of this server", "",
                   "invalid_api_key");
  return chunks_json(service_.cached_chunks(), service_.snapshot().chunk_size,
                     options_.shows_salted);
}

/// Texts are for those who know their salt, or for all who have the key if the operator says so.
std::string HttpServer::tree(const httplib::Request& request) const {
  TreeRights rights;
  rights.matches = !options_.hides_cached;
  rights.explains = served_.explains;
  rights.failure = service_.failure();
  const std::string salt = request.get_header_value("X-Cache-Salt");
  if (has_key(request) && options_.tree_texts)
    rights.texts = [](std::uint64_t) { return true; };
  else if (has_key(request) && !salt.empty())
    rights.texts = [own = service_.tenant_of(salt)](std::uint64_t tenant) {
      return tenant != 0 && tenant == own;
    };
  return tree_json(service_.counters(), service_.snapshot(), *served_.tokenizer, rights);
}

ReplyHead HttpServer::head_of_reply(const char* kind) {
  ReplyHead head;
  head.id = fmt::format("{}-{}{}", kind, id_prefix_, ++replies_);
  head.model = served_.name;
  head.created = seconds_since_1970();
  head.hides_cached = options_.hides_cached;
  return head;
}

/// From before it is submitted: stop() must not overlook it. Until the response is gone.
std::shared_ptr<void> HttpServer::writing() {
  ++generating_;
  return {nullptr, [this](void*) { --generating_; }};
}

/// Says when a reply is there that began now, and how long it took.
std::function<void(const std::string&)> HttpServer::logged(const std::string& path) const {
  return [this, path, start = std::chrono::steady_clock::now()](const std::string& line) {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    options_.log(fmt::format("{}  {} in {:.2f} s", path, line, seconds.count()));
  };
}

void HttpServer::generate(const httplib::Request& request, httplib::Response& response,
                          const std::string& body) {
  const auto log = logged(request.path);
  const bool chat = request.path.starts_with("/v1/chat");
  const ApiRequest asked = chat ? read_chat(body, served_) : read_completion(body, served_);
  ReplyHead head = head_of_reply(chat ? "chatcmpl" : "cmpl");
  head.chat = chat;
  head.usage_follows = asked.include_usage;
  // Clients without a salt are one tenant, but need not trust each other.
  head.tells_texts = options_.tree_texts || !asked.jobs.front().cache_salt.empty();
  const std::shared_ptr<void> guard = writing();
  std::vector<Service::Ticket> tickets = service_.submit(asked.jobs);
  // Only now is it known that it is not refused for want of memory. And while nothing is answered a
  // router may send the request to another server, if this one ends.
  // A client that sends no more is no router, and may wait or not: the reply's head finds out.
  while (!tickets.front().channel().wait_until_said(std::chrono::milliseconds(50)) &&
         !Connection::current().has_ended())
    if (Connection::current().is_gone()) return;  // the client has gone
  set_provider(
      request, response, asked.stream ? "text/event-stream" : json_type,
      std::make_shared<Answer>(std::move(head), *served_.tokenizer, asked, std::move(tickets), log),
      guard);
}

void HttpServer::score(const httplib::Request& request, httplib::Response& response,
                       const std::string& body) {
  const auto log = logged(request.path);
  ScoreRequest asked = read_score(body, served_, options_.max_requests);
  const std::shared_ptr<void> guard = writing();
  const auto answer =
      std::make_shared<ScoreAnswer>(head_of_reply("score"), std::move(asked), service_, log);
  while (!answer->wait(std::chrono::milliseconds(50))) {
    if (Connection::current().is_gone()) return;
    if (Connection::current().has_ended())  // only what is written shows whether it has closed
      return set_provider(request, response, json_type, answer, guard);
  }
  response.set_header("Cache-Control", "no-store");
  response.set_content(answer->body(), json_type);
}

bool HttpServer::has_key(const httplib::Request& request) const {
  if (options_.api_key.empty()) return true;
  return equal_in_constant_time(request.get_header_value("Authorization"),
                                "Bearer " + options_.api_key);
}

/// Pages of the origins that were named may ask and read the answer; others may not.
void HttpServer::allow_origin(const httplib::Request& request, httplib::Response& response) const {
  const std::string origin = request.get_header_value("Origin");
  const auto& allowed = options_.origins;
  if (std::find(allowed.begin(), allowed.end(), origin) == allowed.end()) return;
  response.set_header(allow_origin_header, origin);
  response.set_header("Vary", "Origin");
  if (request.method != "OPTIONS") return;
  response.set_header("Access-Control-Allow-Methods", "GET, POST");
  // Clients have many headers of their own, none of which does anything here.
  response.set_header("Access-Control-Allow-Headers",
                      request.get_header_value("Access-Control-Request-Headers"));
  response.set_header("Access-Control-Max-Age", "600");
}

/// A page of another site may have its name point to this machine. Where no key is asked for and
/// only this machine is served, it must be called so.
bool HttpServer::may_be_named(const std::string& host) const {
  return !options_.api_key.empty() || !is_loopback(options_.host) || host.empty() ||
         is_loopback(host_alone(host));
}

}  // namespace serve
