-- What belongs together stays in one line: an interval such as [0.1, 0.2] or 0.1 to 0.2, 0.3 ± 0.1, n = 3, < 0.001,
-- 95 %, and the names I-STAR and STS-B.
local function number(inline) return inline and inline.t == "Str" and inline.text:match("%d") end
local SIGNS = { ["±"] = true, ["="] = true, ["<"] = true, [">"] = true, ["≤"] = true, ["≥"] = true }
local function sign(inline) return inline.t == "Str" and SIGNS[inline.text] end

local function together(before, left, right, after)
  if sign(left) or sign(right) then return true end
  if left.t ~= "Str" or right.t ~= "Str" then return false end
  if right.text:match("^%%") or left.text:match("^%(?p$") then return number(left) or number(right) end
  if right.text == "to" then return number(left) and number(after) end
  if left.text == "to" then return number(before) and number(right) end
  return left.text:match("%[[^%s%[]*%d,$") and right.text:match("^[^%s%]]*%d%]")
end

function Str(word)
  if word.text:match("I%-STAR") or word.text:match("STS%-B") then return pandoc.Span(word, { class = "whole" }) end
end

function Inlines(inlines)
  for i = 2, #inlines - 1 do
    local space = inlines[i].t == "Space" or inlines[i].t == "SoftBreak"
    if space and together(inlines[i - 3], inlines[i - 1], inlines[i + 1], inlines[i + 3]) then
      inlines[i] = pandoc.Str("\u{a0}")
    end
  end
  return inlines
end
