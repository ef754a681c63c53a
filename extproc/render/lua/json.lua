-- Reading single members of JSON text without decoding the rest. Positions are byte positions; nil where the text is
-- cut short or is no JSON. Keys are compared as written: providers do not escape theirs.

local byte, find, match, sub = string.byte, string.find, string.match, string.sub
local BACKSLASH, BRACE, BRACKET, QUOTE = 92, 123, 91, 34

-- Position of the quote that closes the string opened at `i`.
local function closing(s, i)
  local j, k = i, nil
  repeat
    j = find(s, '"', j + 1, true)
    if not j then return nil end
    k = j - 1
    while byte(s, k) == BACKSLASH do k = k - 1 end
  until (j - k) % 2 == 1
  return j
end

-- Position after the array of plain numbers opened at `i`, or nil where it holds anything else. An embedding has
-- thousands of them. `ahead` keeps where each other mark comes next, so that no stretch of the text is searched twice.
local function past_numbers(s, i, ahead)
  if not find(s, "^%s*[%-%d]", i + 1) then return nil end
  local stop = find(s, "]", i + 1, true)
  for mark, at in pairs(ahead) do
    if at <= i then
      at = find(s, mark, i + 1, true) or #s + 1
      ahead[mark] = at
    end
    if not stop or at < stop then return nil end
  end
  return stop + 1
end

-- Position after the object or array opened at `i`.
local function past_container(s, i)
  local depth, j, ahead = 0, i, { ['"'] = 0, ["["] = 0, ["{"] = 0 }
  repeat
    j = find(s, '["%[%]{}]', j)
    if not j then return nil end
    local c = byte(s, j)
    local after = c == BRACKET and past_numbers(s, j, ahead)
    if after then
      j = after - 1
    elseif c == QUOTE then
      j = closing(s, j)
      if not j then return nil end
    elseif c == BRACE or c == BRACKET then
      depth = depth + 1
    else
      depth = depth - 1
    end
    j = j + 1
  until depth == 0
  return j
end

-- Position after the value that starts at `i`.
local function past(s, i)
  local c = byte(s, i)
  if c == QUOTE then
    local j = closing(s, i)
    return j and j + 1
  elseif c == BRACE or c == BRACKET then
    return past_container(s, i)
  end
  return match(s, "^[%w%.%+%-]+()", i)
end

-- Where each member's value starts in the object opened at `i`, by key, and the position after the object. Of a key
-- written twice the last counts. An object that is cut short gives the members that were read.
local function members(s, i)
  local at = {}
  local j = match(s, "^{%s*()", i)
  if not j then return at, nil end
  if byte(s, j) == 125 then return at, j + 1 end
  while byte(s, j) == QUOTE do
    local last = closing(s, j)
    local start = last and match(s, "^%s*:%s*()", last + 1)
    local stop = start and past(s, start)
    if not stop then return at, nil end
    at[sub(s, j + 1, last - 1)] = start
    local comma, after = match(s, "^%s*([,}])%s*()", stop)
    if comma == "}" then return at, after end
    if not comma then return at, nil end
    j = after
  end
  return at, nil
end

-- The string at `i` as a word that fits in a header or a label: at most 64 of letters, digits, dot, dash, underscore.
-- A number is taken as it is written, cut to the same length; anything else is nil.
local function word(s, i)
  if not i then return nil end
  if byte(s, i) == QUOTE then
    local last = closing(s, i)
    if not last or last == i + 1 then return nil end
    return (sub(s, i + 1, math.min(last - 1, i + 64)):gsub("[^%w_%.%-]", "_"))
  end
  local digits = match(s, "^%-?%d[%d%.]*", i)
  return digits and sub(digits, 1, 64)
end

-- The whole number at `i`, or nil.
local function number(s, i)
  return i and tonumber(match(s, "^%d+", i))
end

-- The text without the mark of its byte order, which some servers put before it.
local MARK = "\239\187\191"
local function unmarked(s)
  return byte(s, 1) == 239 and sub(s, 1, 3) == MARK and sub(s, 4) or s
end

-- Position of an object's opening brace at `i`, or nil where something else stands there.
local function object(s, i)
  return i and byte(s, i) == BRACE and i or nil
end
