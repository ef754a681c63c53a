-- A stand-in for what Envoy gives a Lua filter, with Envoy's own traps: objects fetched before a yield are dead after
-- it; the last chunk stays alive after the loop where the stream ended with data, and is dead where it ended with
-- trailers. `run` plays one response; every way to lose or to hold bytes shows in what it returns.

local turn = 0

-- An object whose methods only work in the turn in which it was fetched.
local function mortal(methods, born)
  local object = {}
  born = born or turn
  for name, method in pairs(methods) do
    object[name] = function(self, ...)
      if turn ~= born then error("object used outside of proper scope", 2) end
      return method(self, ...)
    end
  end
  return object
end

local function buffer(bytes)
  local content = { bytes = bytes }
  return content, mortal({
    length = function() return #content.bytes end,
    getBytes = function(_, at, n)
      if at + n > #content.bytes then error("index/length must be within the buffer", 2) end
      return content.bytes:sub(at + 1, at + n)
    end,
    setBytes = function(_, new) content.bytes = new end,
  }, turn + 1)
end

local function header_map(values)
  return mortal({
    get = function(_, name) return values[name] end,
    remove = function(_, name) values[name] = nil end,
    replace = function(_, name, value) values[name] = value end,
  })
end

-- Calls `respond`, an `envoy_on_response`, with headers, metadata and chunks. The stream ends with its last chunk
-- ("data"), with trailers after it, or not at all ("abort"). Returns the bytes that went on for each chunk, the
-- metadata `llm.tail`, how often it was written, what was logged, and the headers.
function run(respond, headers, route, chunks, ending)
  local tail, writes, logged, sent = {}, 0, {}, {}
  local ended = false
  local handle = {}
  function handle:headers() return header_map(headers) end
  function handle:logErr(text) logged[#logged + 1] = text end
  function handle:streamInfo()
    return mortal({
      dynamicMetadata = function()
        return mortal({
          get = function(_, space) if space == "llm.route" then return route end return tail end,
          set = function(_, space, key, value)
            assert(space == "llm.tail")
            writes = writes + 1
            tail[key] = value
          end,
        })
      end,
    })
  end
  function handle:bodyChunks()
    return function()
      if ended then return nil end
      return coroutine.yield()
    end
  end

  local thread = coroutine.create(respond)
  local function resume(...)
    turn = turn + 1
    local ok, problem = coroutine.resume(thread, ...)
    if not ok then error(problem, 0) end
  end
  resume(handle)
  for i, bytes in ipairs(chunks) do
    ended = i == #chunks and ending == "data"
    local content, wrapper = buffer(bytes)
    if coroutine.status(thread) == "suspended" then resume(wrapper) end
    sent[i] = content.bytes
  end
  if ending == "trailers" then
    ended = true
    if coroutine.status(thread) == "suspended" then resume(nil) end
  end
  return sent, tail, writes, logged, headers
end

-- Headers that can be listed as well, as those of an answer on its way back are.
local function listed(values)
  local methods = {
    get = function(_, name) return values[name] end,
    remove = function(_, name) values[name] = nil end,
    replace = function(_, name, value) values[name] = value end,
  }
  local shown = {}
  for name, value in pairs(values) do shown[name] = value end
  return setmetatable(shown, { __index = methods })
end

-- Calls `respond`, an `envoy_on_response` of one attempt, with an answer that is whole. Its headers are changed in place.
-- Returns the metadata by namespace.
function attempt(respond, headers, route, body)
  local written = { ["llm.tail"] = {}, ["llm.limits"] = {} }
  local handle = {}
  function handle:headers() return listed(headers) end
  function handle:logErr(text) error(text, 0) end
  function handle:body()
    if body == "" then return nil end
    return {
      length = function() return #body end,
      getBytes = function(_, at, n) return body:sub(at + 1, at + n) end,
    }
  end
  function handle:streamInfo()
    return {
      dynamicMetadata = function()
        return {
          get = function(_, space) if space == "llm.route" then return route end return written[space] end,
          set = function(_, space, key, value) written[space][key] = value end,
        }
      end,
    }
  end
  respond(handle)
  return written
end
