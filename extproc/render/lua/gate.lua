-- First in a gate: what admission told in a header, as the metadata that the upstream's script reads. `HEADER`, its
-- name, stands before this text. Whole JSON is read here, but only what our own service wrote: nobody else can send
-- that header to a gate. The path is still as it is in the metadata of the native profile: admission wrote it.

local ESCAPES = { b = "\b", f = "\f", n = "\n", r = "\r", t = "\t" }

local function utf8_of(code)
  if code < 128 then return string.char(code) end
  local bytes, lead, room = "", 192, 32
  repeat
    bytes = string.char(128 + code % 64) .. bytes
    code = math.floor(code / 64)
    local fits = code < room
    if not fits then
      lead, room = lead + room, room / 2
    end
  until fits
  return string.char(lead + code) .. bytes
end

-- The text of a string with escapes, which are read one after the other: half of a pair waits for the other half.
local function unescaped(s)
  local high
  return (string.gsub(s, "\\(.)(%x?%x?%x?%x?)", function(c, behind)
    if c ~= "u" then return (ESCAPES[c] or c) .. behind end
    local code = tonumber(behind, 16)
    if code >= 55296 and code < 56320 then
      high = code
      return ""
    end
    if code < 56320 or code >= 57344 then return utf8_of(code) end
    return utf8_of(65536 + (high - 55296) * 1024 + code - 56320)
  end))
end

local value

local function list(s, i)
  local found, j = {}, match(s, "^%[%s*()", i)
  while byte(s, j) ~= 93 do
    found[#found + 1] = value(s, j)
    j = match(s, "^%s*,?%s*()", past(s, j))
  end
  return found
end

-- The value at `i`.
function value(s, i)
  local c = byte(s, i)
  if c == QUOTE then
    local inside = sub(s, i + 1, closing(s, i) - 1)
    return find(inside, "\\", 1, true) and unescaped(inside) or inside
  end
  if c == BRACKET then return list(s, i) end
  if c == BRACE then
    local found = {}
    for key, at in pairs((members(s, i))) do found[unescaped(key)] = value(s, at) end
    return found
  end
  local text = match(s, "^[%w%.%+%-]+", i)
  if text == "true" then return true end
  if text == "false" then return false end
  return tonumber(text)
end

local function told(handle, s)
  local metadata = handle:streamInfo():dynamicMetadata()
  metadata:set("llm.route", "path", handle:headers():get(":path"))
  for key, at in pairs((members(s, 1))) do metadata:set("llm.route", key, value(s, at)) end
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local s = headers:get(HEADER)
  if not s then return end
  headers:remove(HEADER)
  local ok, problem = pcall(told, handle, s)
  if not ok then handle:logErr("gate: " .. tostring(problem)) end
end
